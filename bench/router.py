"""The router's own speed, in front of workers that only pretend: `python -m bench.router`.

Everything is a process of its own (bench/router_fakes.py) and none has a model: what is left is the
way of a request and of its tokens. By turns, `--rounds` times, each system has

1. requests one after the other: what each adds to the time that the worker took to answer;
2. 64 streams with 2,000 tokens/s in all: what a token's way adds, and CPU time a token;
3. 64 streams as fast as they go: tokens a second of the router's CPU time, which is a core's;
4. one stream with 100 tokens/s: CPU time a token, which is what a model on the same cores feels.

Systems: none (the client asks the pretended backends itself: the ceiling), Baton, Baton of other
trees (`--tree FOLDER`, for before and after), and other routers (`--peer COMMAND`, such as
`sglang-router launch` or `vllm-router` out of an environment of their own) in front of backends
that speak HTTP. Added time is by the clock that all processes share: what was heard, less what was
sent. The last line is JSON. Linux only.
"""

import argparse
import asyncio
import json
import shlex
import statistics
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.idle import thread_ms
from bench.load import one_token_words
from bench.router_client import Heard, complete
from bench.router_processes import Fakes, free_port, spawn_fakes, spawn_router
from bench.serving import percentile

MODEL = "fake"
_PROMPT = "The relay runner hands over the baton. " * 16
GOALS = {"added_ms": 2.0, "added_token_p99_ms": 5.0, "tokens_s_core": 5000.0}


@dataclass(frozen=True)
class System:
    """Something that takes requests at a port."""

    name: str
    ports: tuple[int, ...]
    pid: int | None
    """Of the router; none: there is none."""
    fakes: Fakes


@dataclass(frozen=True)
class Case:
    name: str
    streams: int
    tokens: int
    pace: int
    """Tokens a second of each stream; 0: as fast as they go."""
    repeats: int = 1


CASES = (
    Case("requests", 1, 4, 0, repeats=40),
    Case("steady", 64, 93, 31),
    Case("flood", 64, 400, 0),
    Case("lone", 1, 300, 100),
)


class Seeds:
    """Each request has its own: by it the worker's times are found."""

    last = 0

    def next(self) -> int:
        self.last += 1
        return self.last


async def run(system: System, case: Case, seeds: Seeds) -> dict[str, float]:
    """One case's figures."""
    cpu_ms = _cpu_ms(system)
    heard: list[Heard] = []
    async with asyncio.timeout(120):
        for _ in range(case.repeats):
            asked = [_ask(system, case, seeds.next()) for _ in range(case.streams)]
            heard += await asyncio.gather(*asked)
    cpu_ms = _cpu_ms(system) - cpu_ms
    told = system.fakes.told()
    first_ms, token_ms = [], []
    for one in heard:
        worker = told[one.seed]
        if len(one.events) < case.tokens:
            raise SystemExit(f"{system.name}: {len(one.events)} events for {case.tokens} tokens")
        answered = worker.sent[0] - worker.came
        first_ms.append((one.events[0] - one.sent - answered) / 1e6)
        pairs = zip(one.events[1:], worker.sent[1:], strict=False)
        token_ms += [(event - sent) / 1e6 for event, sent in pairs]
    num_tokens = case.tokens * len(heard)
    wall_s = (max(h.events[-1] for h in heard) - min(h.sent for h in heard)) / 1e9
    return {
        "added_ms": percentile(sorted(first_ms), 0.5),
        "added_p90_ms": percentile(sorted(first_ms), 0.9),
        "added_token_p50_ms": percentile(sorted(token_ms), 0.5),
        "added_token_p99_ms": percentile(sorted(token_ms), 0.99),
        "cpu_us_token": 1e3 * cpu_ms / num_tokens,
        "tokens_s_core": 1e3 * num_tokens / cpu_ms if cpu_ms else 0.0,
        "tokens_s": num_tokens / wall_s,
    }


async def _ask(system: System, case: Case, seed: int) -> Heard:
    port = system.ports[seed % len(system.ports)]
    return await complete(port, MODEL, _PROMPT, seed=seed, max_tokens=case.tokens, pace=case.pace)


def _cpu_ms(system: System) -> float:
    return sum(thread_ms(system.pid).values()) if system.pid else 0.0


Figures = dict[str, dict[str, dict[str, float]]]


async def measure(systems: list[System], rounds: int) -> Figures:
    """System → case → figures, medians over the rounds."""
    seeds = Seeds()
    runs: dict[str, dict[str, list[dict[str, float]]]] = {s.name: {} for s in systems}
    for system in systems:
        await run(system, Case("warm", 8, 16, 0), seeds)
    for _ in range(rounds):
        for case in CASES:
            for system in systems:
                figures = await run(system, case, seeds)
                runs[system.name].setdefault(case.name, []).append(figures)
    return {
        name: {
            case: {key: statistics.median(one[key] for one in many) for key in many[0]}
            for case, many in cases.items()
        }
        for name, cases in runs.items()
    }


def report(told: Figures) -> None:
    print(
        f"{'':14} {'a request':>18} {'a token, 64 streams':>24} {'flood':>20} {'one stream':>22}\n"
        f"{'system':14} {'p50 ms':>9}{'p90':>9} {'p50 ms':>8}{'p99':>8}{'CPU us':>8} "
        f"{'tok/s/core':>10}{'tok/s':>10} {'p50 ms':>7}{'p99':>7}{'CPU us':>8}"
    )
    for name, cases in told.items():
        requests, steady, flood, lone = (cases[case.name] for case in CASES)
        print(
            f"{name:14} {requests['added_ms']:9.2f}{requests['added_p90_ms']:9.2f} "
            f"{steady['added_token_p50_ms']:8.2f}{steady['added_token_p99_ms']:8.2f}"
            f"{steady['cpu_us_token']:8.0f} {flood['tokens_s_core']:10.0f}"
            f"{flood['tokens_s']:10.0f} {lone['added_token_p50_ms']:7.2f}"
            f"{lone['added_token_p99_ms']:7.2f}{lone['cpu_us_token']:8.0f}"
        )
    print(
        f"goals: a request {GOALS['added_ms']} ms, a token's p99 {GOALS['added_token_p99_ms']} ms, "
        f"{GOALS['tokens_s_core']:.0f} tok/s/core"
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.router", description=__doc__)
    parser.add_argument("--model-path", type=Path, required=True, help="folder with a tokenizer")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tree", type=Path, action="append", default=[], help="another Baton")
    parser.add_argument("--peer", action="append", default=[], metavar="COMMAND")
    args = parser.parse_args()
    names = one_token_words(args.model_path / "tokenizer.json")[:64]
    vocabulary = json.loads((args.model_path / "tokenizer.json").read_text())["model"]["vocab"]
    words = {word: vocabulary["Ġ" + word] for word in names}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        workers = spawn_fakes(stack, "grpc", args.workers, words, folder)
        backends = spawn_fakes(stack, "http", args.workers, words, folder)
        systems = [System("no router", tuple(backends.ports), None, backends)]
        for tree in (Path.cwd(), *args.tree):
            command = [sys.executable, "-m", "router", "--mode", "colocated"]
            command += ["--decode", ",".join(f"127.0.0.1:{port}" for port in workers.ports)]
            command += ["--model-path", str(args.model_path), "--served-model-name", MODEL]
            name = "baton" if tree == Path.cwd() else f"baton {tree.name}"
            port, pid = spawn_router(stack, command, "/readyz", cwd=tree)
            systems.append(System(name, (port,), pid, workers))
        for peer in args.peer:
            command = [*shlex.split(peer), "--host", "127.0.0.1", "--policy", "round_robin"]
            command += ["--prometheus-port", str(free_port())]
            command += ["--worker-urls", *(f"http://127.0.0.1:{port}" for port in backends.ports)]
            port, pid = spawn_router(stack, command, "/health", cwd=folder)
            name = Path(shlex.split(peer)[0]).name
            systems.append(System(name, (port,), pid, backends))
        told = asyncio.run(measure(systems, args.rounds))
    report(told)
    line: dict[str, Any] = {"bench": "router", "workers": args.workers, "rounds": args.rounds}
    print(json.dumps({**line, "goals": GOALS, "systems": told}))


if __name__ == "__main__":
    main()
