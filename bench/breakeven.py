"""Where a prompt should be computed, and where it was: `python -m bench.breakeven --model-path
FOLDER`.

Starts `baton up` (flags behind `--` are its own) with one worker of each role, and beside its
router, which chooses (`auto`), two more over the same workers: one that always has the prompt
computed on decode (`local`), one that always has it handed over (`remote`). By prompt length and
load (requests that are under way at once, closed loop) each answers fresh prompts, in rounds, the
three by turns within each round. Compared are the medians over the rounds of the mean time of an
answer: what a request waits, and what it makes others wait, are all in it.

Regret: how much longer answers took than by the better of always local and always remote. It is
never below 0, though a mix of both may be quicker than either. The goals: 5 % on average, 15 % at
any point. The ceiling goes first. Each point is told when it is measured, also as a line of JSON:
a run that is cut off has told all it knew; bench.breakeven_plot draws it. The last line sums up.
"""

import argparse
import asyncio
import json
import random
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench import ceiling
from bench.idle import cluster, model_of
from bench.load import Load, one_token_words, run_load

WAYS = ("local", "remote", "auto")
_START_S, _STOP_S = 60.0, 20.0
_LEAST_REQUESTS = 2
_SHORT = 128
"""Prompt tokens."""


@dataclass(frozen=True, slots=True)
class Setting:
    prompt_len: int
    load: int
    """Requests under way at once."""
    output_len: int
    num_requests: int


@dataclass
class Measured:
    """Of one setting and way; a value a round. Milliseconds."""

    answer_ms: list[float] = field(default_factory=list)
    """Mean over its requests, from sent to the last token."""
    ttft_ms: list[float] = field(default_factory=list)
    num_local: int = 0
    """Prompts that were computed on decode."""
    num_requests: int = 0


def regret(local: float, remote: float, auto: float) -> float:
    """How much worse `auto` is than the better of both; 0 if it is not."""
    return max(0.0, auto / min(local, remote) - 1)


def row(setting: Setting, found: dict[str, Measured]) -> dict[str, Any]:
    medians = {way: statistics.median(found[way].answer_ms) for way in WAYS}
    return {
        "tokens": setting.prompt_len,
        "load": setting.load,
        "answer_ms": {way: round(ms, 1) for way, ms in medians.items()},
        "ttft_ms": {way: round(statistics.median(found[way].ttft_ms), 1) for way in WAYS},
        "each_ms": {way: [round(ms, 1) for ms in found[way].answer_ms] for way in WAYS},
        "local_share": round(found["auto"].num_local / max(1, found["auto"].num_requests), 2),
        "regret": round(regret(**medians), 4),
    }


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    regrets = [one["regret"] for one in rows]
    mean, worst = statistics.fmean(regrets), max(regrets)
    return {
        "mean_regret": round(mean, 4),
        "worst_regret": round(worst, 4),
        "met": mean <= 0.05 and worst <= 0.15,
    }


def line(told: dict[str, Any]) -> str:
    ms = "  ".join(f"{way} {told['answer_ms'][way]:8.1f}" for way in WAYS)
    first = "/".join(f"{told['ttft_ms'][way]:.0f}" for way in WAYS)
    return (
        f"{told['tokens']:5} tokens, {told['load']} at once: {ms} ms  (TTFT {first})  "
        f"local share {told['local_share']:.2f}  regret {told['regret']:6.1%}"
    )


@contextmanager
def router(
    port: int, way: str, model_path: Path, model: str, members: list[dict[str, Any]]
) -> Iterator[None]:
    """One more over the same workers."""
    command = [
        *(sys.executable, "-m", "router", "--port", str(port), "--prefill-at", way),
        *("--model-path", str(model_path), "--served-model-name", model),
        *("--log-level", "error"),
    ]
    for role in ("prefill", "decode"):
        told = ",".join(one["addresses"]["grpc"] for one in members if one["role"] == role)
        command += [f"--{role}", told]
    process = subprocess.Popen(command)
    try:
        deadline = time.monotonic() + _START_S
        while not _is_ready(port):
            if time.monotonic() > deadline or process.poll() is not None:
                raise SystemExit(f"the router that is {way} did not become ready")
            time.sleep(0.1)
        yield
    finally:
        process.terminate()
        process.wait(_STOP_S)


def num_local(port: int) -> int:
    """Prompts that the router there has had computed on decode."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    told = [line for line in text.splitlines() if line.startswith("baton_local_prefills_total{")]
    return round(sum(float(one.rpartition(" ")[2]) for one in told))


class Bench:
    """The three routers under load."""

    def __init__(self, ports: dict[str, int], model: str, words: list[str], seed: int) -> None:
        self._ports = ports
        self._model = model
        self._words = words
        self._draw = random.Random(seed)

    async def measure(self, setting: Setting, rounds: int) -> dict[str, Any]:
        found = {way: Measured() for way in WAYS}
        for _ in range(rounds):
            for way in self._draw.sample(WAYS, len(WAYS)):
                await self._one(setting, way, found[way])
        return row(setting, found)

    async def warm_up(self, lengths: list[int], num: int, output_len: int) -> None:
        """Connections, pages, code; and what the choosing router learns in its first minute."""
        for way in ("local", "remote"):
            await self._one(Setting(lengths[0], 1, output_len, 1), way, Measured())
        for load in (1, 4):
            for length in lengths:
                setting = Setting(length, load, output_len, max(num, load))
                await self._one(setting, "auto", Measured())

    async def _one(self, setting: Setting, way: str, into: Measured) -> None:
        port = self._ports[way]
        before = num_local(port)
        load = Load(
            base_url=f"http://127.0.0.1:{port}",
            model=self._model,
            num_requests=setting.num_requests,
            prompt_len=setting.prompt_len,
            output_len=setting.output_len,
            concurrency=setting.load,
        )
        run = await run_load(load, self._words, seed=self._draw.randrange(1 << 30), num_warmup=0)
        bad = [record.error or "no tokens" for record in run.records if not record.is_ok]
        if bad:
            raise SystemExit(f"{way}: {len(bad)} requests failed: {bad[0]}")
        into.answer_ms.append(1e3 * statistics.fmean(r.end_to_end_s for r in run.records))
        into.ttft_ms.append(1e3 * statistics.fmean(r.ttft_s for r in run.records))
        into.num_local += num_local(port) - before
        into.num_requests += len(run.records)


def _is_ready(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


async def run(args: argparse.Namespace, ports: dict[str, int], model: str) -> list[dict[str, Any]]:
    words = one_token_words(args.model_path / "tokenizer.json")
    bench = Bench(ports, model, words, args.seed)
    lengths, loads = _numbers(args.lengths), _numbers(args.loads)
    await bench.warm_up(sorted({32, min(256, max(lengths))}), args.warm_up, args.output_len)
    rows = []
    for length in lengths:
        for load in loads:
            # Short answers vary more than the ways differ: more of them.
            waves = args.waves * (2 if length <= _SHORT else 1)
            num = max(waves * _LEAST_REQUESTS, waves * load)
            setting = Setting(length, load, args.output_len, num)
            rows.append(await bench.measure(setting, args.rounds))
            print(line(rows[-1]), told_as(args, rows=[rows[-1]]), sep="\n", flush=True)
    return rows


def told_as(args: argparse.Namespace, **figures: Any) -> str:
    """A line of JSON, with how they were measured."""
    settings = {"output_len": args.output_len, "rounds": args.rounds, "waves": args.waves}
    return json.dumps({"bench": "breakeven", **settings, **figures})


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.breakeven",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model-path", type=Path, required=True, help="of a prepared model")
    parser.add_argument("--lengths", default="32,128,512,1024", help="of prompts, in tokens")
    parser.add_argument("--loads", default="1,4", help="requests at once")
    parser.add_argument("--output-len", type=int, default=16)
    parser.add_argument("--waves", type=int, default=2, help="requests of a run, by its load")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--warm-up", type=int, default=4, help="requests by length and load")
    parser.add_argument("--port", type=int, default=8290, help="and the next two")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("flags", nargs="*", help="of `baton up`, behind --")
    return parser.parse_args()


def main() -> None:
    args = _options()
    limits = ceiling.measure(args.model_path)
    for text in limits.lines(max(_numbers(args.lengths))):
        print(text, flush=True)
    ports = {way: args.port + index for index, way in enumerate(("auto", "local", "remote"))}
    with ExitStack() as stack:
        own = ["--model", str(args.model_path), *args.flags]
        members = stack.enter_context(cluster(own, args.port))
        model = model_of(args.port)
        for way in ("local", "remote"):
            stack.enter_context(router(ports[way], way, args.model_path, model, members))
        rows = asyncio.run(run(args, ports, model))
    told = summary(rows)
    print(f"regret: mean {told['mean_regret']:.1%}, worst {told['worst_regret']:.1%}")
    print(told_as(args, **told))


if __name__ == "__main__":
    main()
