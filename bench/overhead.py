"""What a decode step takes outside the model: `python -m bench.overhead --model-path FOLDER`.

Runs the real engine (its loop, runner, sampler, and an asyncio loop that takes its events) and cuts
each turn in which every sequence computed one token into its parts. The goal is 10 % outside the
model at batch 8. The ceiling goes first: what reading the weights once costs. All cases run by
turns, `--rounds` times; a figure is the median over its turns, the spread is that of the rounds'
medians. The last line is JSON.
"""

import argparse
import asyncio
import json
import random
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from bench.ceiling import measure
from engine import model_runner
from engine.async_engine import AsyncEngine, Mailbox
from engine.engine import Engine
from engine.engine_config import EngineConfig
from engine.logprobs import StepLogprobs
from engine.request import EngineEvent, EngineRequest, Leg, RequestId, SamplingParams, TokensOut

CASES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "temperature": {"temperature": 1.0},
    "temperature, top-p": {"temperature": 0.8, "top_p": 0.95},
    "temperature, top-p, top-k": {"temperature": 0.8, "top_p": 0.95, "top_k": 50},
    "top-p, penalties": {
        **{"temperature": 0.8, "top_p": 0.95, "repetition_penalty": 1.1},
        **{"presence_penalty": 0.5, "frequency_penalty": 0.5},
    },
    "greedy, logprobs": {"num_logprobs": 1},
    "greedy, 5 top logprobs": {"num_logprobs": 6},
    "top-p, 5 top logprobs": {"temperature": 0.8, "top_p": 0.95, "num_logprobs": 6},
}
PARTS = ("model", "sampler", "batch", "schedule", "events", "rest")
_PROMPT, _WARM = 128, 8


class Turns:
    """Seconds by part, of each turn; filled by wrappers around the engine's own functions."""

    def __init__(self, engine: Engine) -> None:
        self.done: list[dict[str, float]] = []
        self._now = dict.fromkeys(PARTS, 0.0)
        self._tokens = 0
        loop: Any = engine  # its private parts are what is measured
        self._time(loop._runner._model, "forward", "model")
        for name in ("_sample_row", "sampling"):
            self._time(model_runner, name, "sampler")
        self._time(loop._runner._model.sampler, "sample_tokens", "sampler")
        for name in ("pack", "unpack"):
            self._time(StepLogprobs, name, "sampler")
        self._time(loop._runner, "_batch", "batch")
        for name in ("schedule", "update"):
            self._time(loop._scheduler, name, "schedule")
        self._time(loop, "_tell", "events")
        turn = loop._turn

        def timed_turn() -> None:
            began = time.perf_counter()
            turn()
            self._end(time.perf_counter() - began)

        loop._turn = timed_turn

    def _time(self, owner: Any, name: str, part: str) -> None:
        inner = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            result = inner(*args, **kwargs)
            self._now[part] += time.perf_counter() - began
            if name == "_batch":
                self._tokens = len(result.input_ids)
            return result

        setattr(owner, name, timed)

    def _end(self, seconds: float) -> None:
        parts = self._now
        parts["rest"] = seconds - sum(parts.values())
        self.done.append({**parts, "step": seconds, "tokens": self._tokens})
        self._now, self._tokens = dict.fromkeys(PARTS, 0.0), 0


async def run_batch(engine: AsyncEngine, batch: int, outputs: int, changes: dict[str, Any]) -> None:
    """All of them begin together and end together."""
    await asyncio.gather(
        *(_run_one(engine, index, outputs, changes) for index in range(batch)),
    )


async def _run_one(engine: AsyncEngine, index: int, outputs: int, changes: dict[str, Any]) -> None:
    draw = random.Random(f"{index} {time.monotonic_ns()}")
    prompt = tuple(draw.randrange(1000, 40_000) for _ in range(_PROMPT))
    params = SamplingParams(max_tokens=outputs, ignore_eos=True, seed=index, **changes)
    request = EngineRequest(RequestId(str(draw.random())), Leg.LOCAL, prompt, params)
    mailbox: Mailbox[EngineEvent] = Mailbox()
    with engine.open(request, mailbox.put):
        while True:
            event = await mailbox.next(60.0)
            assert event is not None, "the engine is silent"
            if isinstance(event, TokensOut) and event.finish_reason is not None:
                return


def summary(turns: list[dict[str, float]], batch: int) -> dict[str, float]:
    """Medians in milliseconds, over the turns in which all decoded."""
    decodes = [turn for turn in turns if turn["tokens"] == batch][_WARM:]
    told = {name: 1e3 * statistics.median(t[name] for t in decodes) for name in ("step", *PARTS)}
    told["outside"] = statistics.median(1 - t["model"] / t["step"] for t in decodes)
    return told


@contextmanager
def running(args: argparse.Namespace) -> Iterator[Engine]:
    config = EngineConfig(args.model_path, num_threads=args.threads, kv_memory=256 << 20)
    engine = Engine(config)
    engine.start()
    try:
        yield engine
    finally:
        engine.stop()


async def measure_cases(
    engine: Engine, turns: Turns, args: argparse.Namespace
) -> dict[tuple[int, str], list[dict[str, float]]]:
    served = AsyncEngine(engine, observe_wait=lambda seconds: None)
    await run_batch(served, 2, 16, {})
    rounds: dict[tuple[int, str], list[dict[str, float]]] = {}
    for _ in range(args.rounds):
        for batch in args.batches:
            for name, changes in CASES.items():
                turns.done.clear()
                await run_batch(served, batch, args.outputs, changes)
                rounds.setdefault((batch, name), []).append(summary(turns.done, batch))
    return rounds


def report(rounds: dict[tuple[int, str], list[dict[str, float]]]) -> list[dict[str, Any]]:
    print(f"{'batch, case':32} {'step ms':>8}", *(f"{part:>8}" for part in PARTS), "outside model")
    told: list[dict[str, Any]] = []
    for (batch, name), runs in rounds.items():
        ms = {key: round(statistics.median(run[key] for run in runs), 4) for key in runs[0]}
        low, high = (pick(run["outside"] for run in runs) for pick in (min, max))
        columns = (f"{ms[key]:8.3f}" for key in ("step", *PARTS))
        print(f"{batch}, {name:29}", *columns, f"{ms['outside']:6.1%} ({low:.1%} to {high:.1%})")
        told.append({"batch": batch, "case": name, "ms": ms, "outside": [low, high]})
    return told


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.overhead", description=__doc__)
    parser.add_argument("--model-path", type=Path, required=True, help="folder of the model")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--outputs", type=int, default=64, help="tokens of each request")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    ceiling = measure(args.model_path)
    print("\n".join(ceiling.lines(prompt_len=_PROMPT)))
    with running(args) as engine:
        turns = Turns(engine)
        rounds = asyncio.run(measure_cases(engine, turns, args))
    line = {"bench": "overhead", "threads": args.threads, "rounds": args.rounds}
    print(json.dumps({**line, "floor_ms": ceiling.tpot_floor_ms, "cases": report(rounds)}))


if __name__ == "__main__":
    main()
