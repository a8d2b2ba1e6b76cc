"""Mixed load with rare faults of the wire and clients that leave, for as long as is wanted: every
answer is right, and threads, files and memory of the workers are looked at meanwhile.
"""

import asyncio
import random
import time
from dataclasses import dataclass, field

import numpy as np
import psutil

from tests.e2e.cluster import WorkerProcess
from tests.e2e.harmed import HarmedCluster
from tests.e2e.slow_relay import prompt_of, relay_client, undisturbed
from tests.e2e.tokens import TokenClient

PERIOD_S = 0.5
NUM_CLIENTS = 6
LEAVES = 0.05
"""So many requests are given up by who asked, at any moment."""
CASES = [(length, outputs) for length in (1, 17, 100, 400) for outputs in (2, 10, 40)]
FAULTS = "*:drop:0.001,*:delay:0.01:seconds=0.02,kv:duplicate:0.003,kv:corrupt:0.003,*:kill:0.001"
STEADY_FROM = 1 / 3
"""The part of the time before it is for caches to fill and for every connection to be made."""


@dataclass
class Watched:
    """Of one worker, at each look."""

    times: list[float] = field(default_factory=list)
    threads: list[int] = field(default_factory=list)
    files: list[int] = field(default_factory=list)
    resident: list[int] = field(default_factory=list)

    def look(self, worker: WorkerProcess) -> None:
        process = psutil.Process(worker.pid)
        with process.oneshot():
            self.times.append(time.monotonic())
            self.threads.append(process.num_threads())
            self.files.append(process.num_fds())
            self.resident.append(process.memory_info().rss)

    @property
    def slope(self) -> float:
        """Resident bytes a minute, of the steady part."""
        first = int(len(self.times) * STEADY_FROM)
        minutes = np.array(self.times[first:]) / 60
        return float(np.polyfit(minutes - minutes[0], self.resident[first:], 1)[0])

    def grown(self, counts: list[int]) -> int:
        """Most in the last third, beyond the most in the one before it."""
        third = len(counts) // 3
        return max(counts[2 * third :]) - max(counts[third : 2 * third])


async def soak(cluster: HarmedCluster, seconds: float) -> list[Watched]:
    """What became of each worker. Fails if an answer is wrong, or something is left behind."""
    expected = [await undisturbed(cluster, prompt_of(i, n), k) for i, (n, k) in enumerate(CASES)]
    watched = {worker: Watched() for worker in cluster.workers}
    cluster.harm(FAULTS)
    end = time.monotonic() + seconds
    async with relay_client(cluster) as client:
        watching = asyncio.create_task(_watch_until(end, watched))
        answered = await asyncio.gather(
            *(_ask_until(end, random.Random(i), client, expected) for i in range(NUM_CLIENTS))
        )
        await watching
        print(f"{sum(answered)} answers in {seconds:g} s; retries: ", end="")
        print(f"{client.retries('prefill'):.0f} prefill, {client.retries('decode'):.0f} decode")
    cluster.harm("")
    assert min(answered) > 0
    await asyncio.to_thread(cluster.assert_all_back, 6.0)
    for worker, looks in watched.items():
        print(
            f"{worker.name}: threads {looks.threads[-1]} (+{looks.grown(looks.threads)}), "
            f"files {looks.files[-1]} (+{looks.grown(looks.files)}), "
            f"resident {looks.resident[-1] >> 20} MiB ({looks.slope / 2**20:+.2f} MiB a minute)"
        )
    return list(watched.values())


def assert_no_more_threads_or_files(watched: list[Watched]) -> None:
    for looks in watched:
        assert looks.grown(looks.threads) <= 2
        assert looks.grown(looks.files) <= 4


async def _ask_until(
    end: float, draw: random.Random, client: TokenClient, expected: list[list[int]]
) -> int:
    """How many were answered, all rightly."""
    num_answered = 0
    while time.monotonic() < end:
        case = draw.randrange(len(CASES))
        length, num_outputs = CASES[case]
        asked = asyncio.create_task(
            client.generate(prompt_of(case, length), num_outputs, cache_salt=str(draw.random()))
        )
        if draw.random() < LEAVES:
            await asyncio.sleep(draw.uniform(0, 0.1))
            asked.cancel()
            await asyncio.gather(asked, return_exceptions=True)
        else:
            assert await asked == expected[case], f"case {CASES[case]}"
            num_answered += 1
    return num_answered


async def _watch_until(end: float, watched: dict[WorkerProcess, Watched]) -> None:
    while time.monotonic() < end:
        for worker, looks in watched.items():
            await asyncio.to_thread(looks.look, worker)
        await asyncio.sleep(PERIOD_S)
