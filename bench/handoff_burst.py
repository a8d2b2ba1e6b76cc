"""Whether prompts that are handed over shake the streams beside them.

Streams run all the time. In windows by turns there is nothing else, and prompts that prefill has
cached are handed over to the same decode worker, several at once and each again as soon as it is
there. Streams grow meanwhile, so windows alternate.

Each prompt also joins the batch, for a step behind all of its tokens, whoever brought its KV. What
that alone does is measured by `joins`: the same prompts, of which decode has all KV cached.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from itertools import pairwise

from bench.handoff_requests import Client, Prompts
from bench.serving import percentile


@dataclass(slots=True)
class Burst:
    """Gaps between tokens of running streams, in milliseconds, without installs and with them."""

    quiet: list[float] = field(default_factory=list)
    shaken: list[float] = field(default_factory=list)
    num_installs: int = 0
    wall_s: float = 0.0
    """Of the time with them."""

    def p99_raised(self) -> float:
        """By so much of itself."""
        return percentile(sorted(self.shaken), 0.99) / percentile(sorted(self.quiet), 0.99) - 1


async def installs(
    client: Client, prompts: Prompts, *, num_prompts: int, num_tokens: int, rounds: int
) -> Burst:
    """`rounds` windows of each kind. Raises ValueError if a stream ends before the last one."""
    ready = [prompts.of(num_tokens) for _ in range(num_prompts)]
    for prompt in ready:
        await client.compute(prompt)
    return await _beside_streams(client, prompts, rounds, lambda s: _hand_over(client, ready, s))


async def joins(
    client: Client, prompts: Prompts, *, num_tokens: int, rounds: int, interval_s: float
) -> Burst:
    """Where decode keeps a prefix cache: each interval one that it has cached joins, for the last
    token of the prompt and for one more; so twice as many steps as installs cause."""
    prompt = prompts.of(num_tokens // 16 * 16 + 1)
    await client.relay(prompt)

    async def load(until_s: float) -> int:
        count = 0
        while time.perf_counter() < until_s:
            await asyncio.gather(client.complete(prompt, 2), asyncio.sleep(interval_s))
            count += 1
        return count

    return await _beside_streams(client, prompts, rounds, load)


async def _beside_streams(
    client: Client,
    prompts: Prompts,
    rounds: int,
    load: Callable[[float], Awaitable[int]],
    num_streams: int = 4,
    stream_tokens: int = 2500,
    window_s: float = 1.5,
) -> Burst:
    times: list[list[float]] = [[] for _ in range(num_streams)]
    begun = [asyncio.Event() for _ in range(num_streams)]
    told, windows = Burst(), []
    async with asyncio.TaskGroup() as group:
        streams = [
            group.create_task(client.stream(prompts.of(128), stream_tokens, its, running))
            for its, running in zip(times, begun, strict=True)
        ]
        for running in begun:
            await running.wait()
        for _ in range(rounds):
            begin = time.perf_counter()
            await asyncio.sleep(window_s)
            middle = time.perf_counter()
            told.num_installs += await load(middle + window_s)
            windows.append((begin, middle, time.perf_counter()))
        if any(stream.done() for stream in streams):
            raise ValueError("the streams ended before the last window: take fewer rounds")
        for stream in streams:
            stream.cancel()
    gaps = [gap for its in times for gap in pairwise(its)]
    for begin, middle, end in windows:
        told.quiet += [1e3 * (b - a) for a, b in gaps if begin <= a and b <= middle]
        told.shaken += [1e3 * (b - a) for a, b in gaps if middle <= b and a <= end]
        told.wall_s += end - middle
    return told


async def _hand_over(client: Client, ready: list[list[int]], until_s: float) -> int:
    """How often one was."""

    async def again_and_again(prompt: list[int]) -> int:
        count = 0
        while time.perf_counter() < until_s:
            await client.relay(prompt)
            count += 1
        return count

    return sum(await asyncio.gather(*map(again_and_again, ready)))
