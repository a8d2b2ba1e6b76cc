"""Replays a request trace against a running cluster: `python -m bench.replay_live TRACE
[--port 8000]`.

A block of the trace (512 tokens) becomes one of `--block` tokens: lengths are divided, equal blocks
stay equal (their token ids are drawn from their name), so what is shared is shared. Outputs are
divided by `--output-divisor`, time by `--speed`. Printed first is the ceiling: the hit rate of one
endless cache. The last line is JSON: TTFT, TPOT, hit rate as the answers tell it, failures.
"""

import argparse
import asyncio
import json
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from bench.handoff_requests import VOCABULARY
from bench.idle import model_of
from bench.serving import percentile
from bench.traces import BLOCK_SIZE, Arrival, read

TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Answer:
    """Seconds."""

    ttft: float
    tpot: float
    num_tokens: int
    num_cached: int


def scaled(arrival: Arrival, block: int, output_divisor: int, max_tokens: int) -> Arrival:
    """With blocks of so many tokens, at most `max_tokens` of them."""
    num_tokens = min(max_tokens, max(1, arrival.num_tokens * block // BLOCK_SIZE))
    blocks = arrival.blocks[: -(-num_tokens // block)]
    num_outputs = max(2, arrival.num_outputs // output_divisor)
    return arrival._replace(num_tokens=num_tokens, num_outputs=num_outputs, blocks=blocks)


def token_ids(arrival: Arrival, block: int) -> list[int]:
    """Of its prompt: a block's are drawn from its name."""
    found: list[int] = []
    for name in arrival.blocks:
        found += random.Random(name).choices(VOCABULARY, k=block)
    return found[: arrival.num_tokens]


def ceiling(trace: Sequence[Arrival], block: int) -> float:
    """Hit rate of one endless cache."""
    known: set[int] = set()
    num_hit = 0
    for one in trace:
        found = 0
        while found < len(one.blocks) and one.blocks[found] in known:
            found += 1
        num_hit += min(found * block, one.num_tokens - 1)
        known.update(one.blocks)
    return num_hit / sum(one.num_tokens for one in trace)


class Client:
    def __init__(self, session: aiohttp.ClientSession, url: str, model: str) -> None:
        self._session = session
        self._url = f"{url}/v1/completions"
        self._model = model

    async def ask(self, prompt: list[int], num_outputs: int) -> Answer:
        """Raises aiohttp.ClientError, TimeoutError, ValueError."""
        body = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": num_outputs,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        began, times, usage = time.perf_counter(), list[float](), dict[str, Any]()
        async with self._session.post(self._url, json=body) as response:
            response.raise_for_status()
            async for line in response.content:
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    raise ValueError(event["error"]["message"])
                usage = event.get("usage") or usage
                if event["choices"]:
                    times.append(time.perf_counter())
        if not times or not usage:
            raise ValueError("an answer without tokens or usage")
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        tpot = (times[-1] - times[0]) / max(1, usage["completion_tokens"] - 1)
        return Answer(times[0] - began, tpot, usage["prompt_tokens"], cached)


async def replay(
    trace: Sequence[Arrival], url: str, model: str, block: int, speed: float
) -> tuple[list[Answer], list[str]]:
    """Answers, and what went wrong."""
    answers: list[Answer] = []
    wrong: list[str] = []
    timeout, limit = aiohttp.ClientTimeout(total=TIMEOUT_S), aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=limit) as session:
        client, began = Client(session, url, model), time.perf_counter()

        async def one(arrival: Arrival) -> None:
            try:
                answers.append(await client.ask(token_ids(arrival, block), arrival.num_outputs))
            except (aiohttp.ClientError, TimeoutError, ValueError) as error:
                wrong.append(repr(error))

        async with asyncio.TaskGroup() as group:
            for arrival in trace:
                due = began + arrival.at_s / speed
                await asyncio.sleep(max(0.0, due - time.perf_counter()))
                group.create_task(one(arrival))
    return answers, wrong


def report(answers: Sequence[Answer], wrong: Sequence[str]) -> dict[str, Any]:
    """Without answers, how many failed is all there is."""
    if not answers:
        return {"answered": 0, "failed": len(wrong)}
    ttfts = sorted(answer.ttft for answer in answers)
    total = sum(answer.num_tokens for answer in answers)
    return {
        "answered": len(answers),
        "failed": len(wrong),
        "hit_rate": round(sum(answer.num_cached for answer in answers) / total, 4),
        "mean_ttft_s": round(statistics.fmean(ttfts), 4),
        "p50_ttft_s": round(percentile(ttfts, 0.5), 4),
        "p90_ttft_s": round(percentile(ttfts, 0.9), 4),
        "mean_tpot_ms": round(1e3 * statistics.fmean(answer.tpot for answer in answers), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.replay_live",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("trace", type=Path)
    parser.add_argument("--lengths", type=Path, help="ServeGen lengths, for ServeGen rates")
    parser.add_argument("--port", type=int, default=8000, help="of the router, on this machine")
    parser.add_argument("--requests", type=int, default=100, help="the first so many")
    parser.add_argument("--rate", type=float, default=5.0, help="of files without times")
    parser.add_argument("--block", type=int, default=16, help="tokens of a block")
    parser.add_argument("--max-tokens", type=int, default=2000, help="of a prompt, scaled")
    parser.add_argument("--output-divisor", type=int, default=32)
    parser.add_argument("--speed", type=float, default=1.0, help="times the trace's rate")
    args = parser.parse_args()
    rows = read(args.trace, max_requests=args.requests, rate=args.rate, lengths=args.lengths)
    trace = [scaled(one, args.block, args.output_divisor, args.max_tokens) for one in rows]
    total, seconds = sum(one.num_tokens for one in trace), trace[-1].at_s / args.speed
    print(f"{len(trace)} requests, {total} prompt tokens in {seconds:.0f} s")
    print(f"ceiling: hit rate {ceiling(trace, args.block):.3f} (one endless cache)", flush=True)
    url = f"http://127.0.0.1:{args.port}"
    run = replay(trace, url, model_of(args.port), args.block, args.speed)
    answers, wrong = asyncio.run(run)
    for text in sorted(set(wrong))[:3]:
        print(f"  failed: {text}")
    settings = {key: str(value) for key, value in vars(args).items()}
    print(json.dumps({"bench": "replay_live", "settings": settings, **report(answers, wrong)}))


if __name__ == "__main__":
    main()
