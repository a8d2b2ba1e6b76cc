"""Replays a request trace in virtual time against simulated prefill workers, rule by rule.

    python -m bench.replay TRACE [--workers 6] [--tokens-per-s 8000] [--blocks 6000]

The router's own placement code runs beside other rules (bench/replay_rules.py), all on the same
trace and workers. Printed first is the ceiling: the hit rate of one cache without end, and the mean
TTFT if nothing ever queued. Goodput is the highest rate, as a multiple of the trace's, at which a
share of the requests meets the objective on TTFT (bisected). The last line is JSON.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.replay_rules import RULES, Hardware, Rule, View
from bench.replay_workers import Order, SimWorker, imbalance
from bench.traces import BLOCK_SIZE, Arrival, read


@dataclass(frozen=True)
class Cluster:
    num_workers: int
    num_blocks: int
    hardware: Hardware
    order: Order


@dataclass(frozen=True)
class Result:
    ttfts: list[float]
    hit_rate: float
    """Prompt tokens that were not computed."""
    imbalance: float

    @property
    def mean_s(self) -> float:
        return sum(self.ttfts) / len(self.ttfts)

    def quantile(self, share: float) -> float:
        return sorted(self.ttfts)[min(len(self.ttfts) - 1, int(share * len(self.ttfts)))]

    def share_within(self, slo_s: float) -> float:
        return sum(ttft <= slo_s for ttft in self.ttfts) / len(self.ttfts)


def replay(trace: Sequence[Arrival], rule: Rule, cluster: Cluster, scale: float = 1.0) -> Result:
    """The trace at so many times its rate."""
    workers = [
        SimWorker(f"p{i}", cluster.hardware.tokens_per_s, cluster.num_blocks, cluster.order)
        for i in range(cluster.num_workers)
    ]
    num_known = 0
    for arrival in trace:
        at_s = arrival.at_s / scale
        for worker in workers:
            worker.run_until(at_s)
        views = [
            View(one, one.num_cached(arrival), one.queue_s(at_s), one.num_requests)
            for one in workers
        ]
        pick = rule(arrival, views)
        workers[pick.index].give(arrival, at_s, pick.num_known, pick.fetch_s)
        num_known += pick.num_known
    for worker in workers:
        worker.run_until(float("inf"))
    ttfts = [ttft for worker in workers for _, ttft in worker.done]
    total = sum(arrival.num_tokens for arrival in trace)
    return Result(ttfts, num_known / total, imbalance(workers))


def goodput(
    trace: Sequence[Arrival], name: str, cluster: Cluster, slo_s: float, share: float
) -> float:
    """The highest multiple of the trace's rate that meets the objective, to 2 %; 0: none above a
    twentieth."""
    low, high = 0.05, 8.0
    while high - low > 0.02 * low:
        middle = (low + high) / 2
        result = replay(trace, RULES[name](cluster.hardware), cluster, middle)
        if result.share_within(slo_s) >= share:
            low = middle
        else:
            high = middle
    return low if low > 0.05 else 0.0


def ceiling(trace: Sequence[Arrival], cluster: Cluster) -> tuple[float, float]:
    """Hit rate of one endless cache, and mean TTFT without any queue."""
    known: set[int] = set()
    num_hit = 0
    for arrival in trace:
        found = 0
        for block in arrival.blocks:
            if block not in known:
                break
            found += 1
        num_hit += min(found * BLOCK_SIZE, arrival.num_tokens - 1)
        known.update(arrival.blocks)
    total = sum(arrival.num_tokens for arrival in trace)
    mean_s = (total - num_hit) / len(trace) / cluster.hardware.tokens_per_s
    return num_hit / total, mean_s


def main(argv: Sequence[str] | None = None) -> None:
    options = _options(argv)
    hardware = Hardware(options.tokens_per_s, options.fetch_tokens_per_s)
    cluster = Cluster(options.workers, options.blocks, hardware, options.order)
    trace = read(
        Path(options.trace),
        max_requests=options.requests,
        rate=options.rate,
        seed=options.seed,
        lengths=Path(options.lengths) if options.lengths else None,
    )
    hit, mean_s = ceiling(trace, cluster)
    print(f"{len(trace)} requests in {trace[-1].at_s:.0f} s; workers: {cluster.order} order")
    print(f"ceiling: hit rate {hit:.3f} (one endless cache), mean TTFT {mean_s:.2f} s (no queue)")
    told: dict[str, dict[str, float]] = {}
    for name in RULES:
        result = replay(trace, RULES[name](hardware), cluster, options.scale)
        rate = goodput(trace, name, cluster, options.slo_ttft_s, 0.9) if options.goodput else 0.0
        told[name] = {
            "hit_rate": round(result.hit_rate, 4),
            "mean_ttft_s": round(result.mean_s, 4),
            "p90_ttft_s": round(result.quantile(0.9), 3),
            "p99_ttft_s": round(result.quantile(0.99), 3),
            "imbalance": round(result.imbalance, 3),
            "within_slo": round(result.share_within(options.slo_ttft_s), 4),
            **({"goodput": round(rate, 3)} if options.goodput else {}),
        }
        shown = "  ".join(f"{key} {value:7.3f}" for key, value in told[name].items())
        print(f"{name:15} {shown}")
    settings = {key: value for key, value in vars(options).items() if key != "lengths"}
    print(json.dumps({"bench": "replay", "settings": settings, "rules": told}))


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.replay", description=__doc__)
    parser.add_argument("trace", help="Mooncake, Azure, ServeGen or lengths file; .gz too")
    parser.add_argument("--lengths", help="ServeGen lengths, for a file of ServeGen rates")
    parser.add_argument("--requests", type=int, default=5000, help="the first so many")
    parser.add_argument("--rate", type=float, default=5.0, help="requests/s of files without times")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=6)
    parser.add_argument("--tokens-per-s", type=float, default=8000.0, help="prefill of a worker")
    parser.add_argument("--blocks", type=int, default=6000, help="512-token blocks it caches")
    parser.add_argument("--order", choices=("srf", "fcfs"), default="srf", help="of its queue")
    parser.add_argument("--scale", type=float, default=1.0, help="times the trace's rate")
    parser.add_argument(
        "--fetch-tokens-per-s", type=float, default=0.0, help="KV between prefill workers; 0: none"
    )
    parser.add_argument("--slo-ttft-s", type=float, default=5.0, help="that 90 %% shall meet")
    parser.add_argument("--goodput", action=argparse.BooleanOptionalAction, default=True)
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
