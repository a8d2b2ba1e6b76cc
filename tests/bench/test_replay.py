"""Traces are read as they are meant, and the replay computes what a pencil does."""

import gzip
import json
from pathlib import Path
from random import Random

import pytest

from bench.replay import Cluster, ceiling, goodput, main, replay
from bench.replay_rules import RULES, Hardware
from bench.replay_workers import Order, SimWorker
from bench.traces import BLOCK_SIZE, Arrival, UnknownTrace, read

HARDWARE = Hardware(tokens_per_s=1000.0, fetch_tokens_per_s=0.0)


def cluster(num_workers: int = 3, num_blocks: int = 200, order: Order = "fcfs") -> Cluster:
    return Cluster(num_workers, num_blocks, HARDWARE, order)


def talks(num: int = 300, seed: int = 1) -> list[Arrival]:
    """Sessions whose prompts grow by a block or two a turn."""
    draw, found, at_s = Random(seed), [], 0.0
    histories: list[list[int]] = [[0, session * 1000] for session in range(1, 25)]
    for _ in range(num):
        at_s += draw.expovariate(1.0)
        talk = draw.choice(histories)
        talk += [talk[1] + len(talk) + extra for extra in range(draw.choice((1, 2)))]
        if len(talk) > 8:
            del talk[3:]
            talk[1] += 50
        found.append(Arrival(at_s, len(talk) * BLOCK_SIZE - draw.randrange(300), 50, tuple(talk)))
    return found


def test_mooncake_and_azure_and_lengths(tmp_path: Path) -> None:
    rows = [
        {"timestamp": 2500, "input_length": 600, "output_length": 7, "hash_ids": [0, 5]},
        {"timestamp": 4000, "input_length": 9, "output_length": 1, "hash_ids": [0]},
    ]
    path = tmp_path / "mooncake.jsonl.gz"
    with gzip.open(path, "wt") as file:
        file.write("\n".join(map(json.dumps, rows)))
    assert read(path, max_requests=9) == [Arrival(0, 600, 7, (0, 5)), Arrival(1.5, 9, 1, (0,))]
    azure = tmp_path / "azure.csv"
    azure.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:17:03.9799600,374,44\n"
        "2023-11-16 18:17:04.4799600,1024,9\n"
    )
    first, second = read(azure, max_requests=9)
    assert (first.num_tokens, second.num_outputs) == (374, 9)
    assert second.at_s == pytest.approx(0.5)
    assert len({*first.blocks, *second.blocks}) == 3  # nobody shares
    lengths = tmp_path / "lengths.csv"
    lengths.write_text("num_prefill_tokens,num_decode_tokens\n10,2\n20,3\n30,4\n")
    assert [one.num_tokens for one in read(lengths, max_requests=2)] == [10, 20]


def test_servegen_fills_its_window(tmp_path: Path) -> None:
    lengths = tmp_path / "lengths.jsonl"
    told = {"input_tokens": "{100: 0.5, 200: 0.5}", "output_tokens": "{7: 1.0}"}
    idle = {"input_tokens": "{}", "output_tokens": "{}"}
    lengths.write_text(json.dumps(idle) + "\n" + json.dumps(told) + "\n")
    rates = tmp_path / "rates.csv"
    rates.write_text(
        "client,window_start_s,rate_rps,cv,dist,param1,param2\n"
        "a,600,0.5,1,Gamma,1.5,2\nb,600,0.25,1,Weibull,0.8,1\na,1200,9,1,Gamma,1,1\n"
    )
    found = read(rates, max_requests=999, lengths=lengths)
    assert len(found) == 450
    assert 500 < found[-1].at_s <= 600
    assert {one.num_tokens for one in found} == {100, 200}
    assert found == read(rates, max_requests=999, lengths=lengths)  # the same again
    assert len(read(lengths, max_requests=5)) == 5
    with pytest.raises(UnknownTrace, match="--lengths"):
        read(rates, max_requests=9)


def test_a_worker_queues_caches_and_evicts() -> None:
    worker = SimWorker("p", 1000.0, num_blocks=4, order="fcfs")
    one = Arrival(0.0, 1024, 1, (1, 2))
    worker.give(one, 0.0, 0)
    again = Arrival(0.0, 1536, 1, (1, 2, 3))
    assert worker.num_cached(again) == 1024
    worker.give(again, 0.0, 1024)
    assert worker.queue_s(0.0) == pytest.approx(1.536)
    worker.run_until(10.0)
    assert [ttft for _, ttft in worker.done] == pytest.approx([1.024, 1.536])
    worker.give(Arrival(0.0, 1024, 1, (8, 9)), 10.0, 0)
    assert worker.num_cached(again) == 1024  # the end of a prefix goes first
    assert worker.num_cached(one) == 1023  # a token is left to compute


def test_the_shortest_goes_first_where_the_order_says_so() -> None:
    worker = SimWorker("p", 1000.0, num_blocks=99, order="srf")
    worker.give(Arrival(0.0, 9000, 1, (0,)), 0.0, 0)
    for block in range(60):
        worker.give(Arrival(0.0, 500, 1, (block + 1,)), 0.0, 0)
    worker.run_until(999.0)
    order = [arrival.num_tokens for arrival, _ in worker.done]
    assert order[:20] == [500] * 20
    assert 9000 in order[:-5]  # it has aged


@pytest.mark.parametrize("order", ["fcfs", "srf"])
def test_every_request_is_served_by_every_rule_and_ours_is_quicker(order: Order) -> None:
    trace = talks()
    results = {
        name: replay(trace, rule(HARDWARE), cluster(order=order), scale=3.0)
        for name, rule in RULES.items()
    }
    hit_rate, mean_s = ceiling(trace, cluster())
    for result in results.values():
        assert len(result.ttfts) == len(trace)
        assert result.hit_rate <= hit_rate
        assert result.mean_s >= 0.8 * mean_s  # copies of one cache may lack less than one
    ours = results["baton"]
    assert ours.mean_s < 0.65 * results["least-requests"].mean_s
    assert ours.hit_rate > 1.3 * results["least-requests"].hit_rate
    assert ours.imbalance < 1.2


def test_a_prefix_is_fetched_where_that_is_quicker() -> None:
    trace = [Arrival(0.0, 2048, 1, (1, 2, 3, 4)), Arrival(0.1, 2049, 1, (1, 2, 3, 4, 5))]
    views_of = {0.0: 2.048 + 1.949, 1e6: 2.048 + 0.003}
    for fetch, total_s in views_of.items():
        hardware = Hardware(1000.0, fetch)
        for name in ("conductor", "baton"):
            made = Cluster(2, 99, hardware, "fcfs")
            result = replay(trace, RULES[name](hardware), made)
            assert sum(result.ttfts) == pytest.approx(total_s, abs=0.01)


def test_goodput_is_where_the_objective_breaks() -> None:
    trace = [Arrival(float(n), 500, 1, (n,)) for n in range(200)]
    found = goodput(trace, "least-queue", cluster(num_workers=1), slo_s=0.6, share=0.9)
    assert 1.9 < found < 2.2  # half a second each


def test_the_command_prints_the_ceiling_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.jsonl"
    rows = [
        {
            "timestamp": one.at_s * 1000,
            "input_length": one.num_tokens,
            "output_length": 1,
            "hash_ids": one.blocks,
        }
        for one in talks(30)
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    main([str(path), "--no-goodput", "--workers", "2"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("ceiling: ")
    assert set(json.loads(lines[-1])["rules"]) == set(RULES)
