"""Simulated prefill workers in virtual time: a queue, a speed, and an LRU prefix cache.

A worker computes one prompt at a time, in chunks. Its order is the engine's (engine/
prefill_order.py): `fcfs`, or `srf`, shortest remaining first, ageing by what has come since.
What is given to it counts as cached from then on: a second prompt with the same prefix waits for
the first. Decoding is not simulated.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from bench.traces import BLOCK_SIZE, Arrival

Order = Literal["fcfs", "srf"]
CHUNK = 2048
_AGEING = 0.5


@dataclass
class Job:
    at_s: float
    seconds: float
    """Before anything is computed, of fetching a prefix."""
    num_left: int
    num_arrived: int
    """Tokens that had come to the worker by then, its own included."""
    arrival: Arrival


class SimWorker:
    """See the module."""

    def __init__(self, name: str, tokens_per_s: float, num_blocks: int, order: Order) -> None:
        self.name = name
        self.num_computed = 0
        self.num_given = 0
        self.done: list[tuple[Arrival, float]] = []
        """With the TTFT of each."""
        self._speed = tokens_per_s
        self._num_blocks = num_blocks
        self.ageing = _AGEING if order == "srf" else 0.0
        self._cache: OrderedDict[int, None] = OrderedDict()
        self._jobs: list[Job] = []
        self._now_s = 0.0

    @property
    def num_requests(self) -> int:
        """That wait or are computed."""
        return len(self._jobs)

    def num_cached(self, arrival: Arrival) -> int:
        """Tokens of its prefix."""
        found = 0
        for block in arrival.blocks:
            if block not in self._cache:
                break
            found += 1
        return min(found * BLOCK_SIZE, arrival.num_tokens - 1)

    def queue_s(self, at_s: float) -> float:
        """All that is to be done, as of then."""
        work_s = sum(job.seconds + job.num_left / self._speed for job in self._jobs)
        return work_s + max(0.0, self._now_s - at_s)

    def give(self, arrival: Arrival, at_s: float, num_known: int, fetch_s: float = 0.0) -> None:
        """`num_known`: tokens that it need not compute."""
        num_left = arrival.num_tokens - num_known
        self.num_computed += num_left
        self.num_given += num_left
        self._jobs.append(Job(at_s, fetch_s, num_left, self.num_given, arrival))
        self._store(arrival.blocks)

    def run_until(self, until_s: float) -> None:
        while self._jobs and self._now_s < until_s:
            job = min(self._jobs, key=self._key) if self.ageing else self._jobs[0]
            num = min(CHUNK, job.num_left)
            self._now_s += job.seconds + num / self._speed
            job.seconds, job.num_left = 0.0, job.num_left - num
            if not job.num_left:
                self._jobs.remove(job)
                self.done.append((job.arrival, self._now_s - job.at_s))
        if not self._jobs:
            self._now_s = max(self._now_s, min(until_s, 1e18))

    def _key(self, job: Job) -> tuple[float, float]:
        return job.num_left + _AGEING * job.num_arrived, job.at_s

    def _store(self, blocks: Sequence[int]) -> None:
        for block in reversed(blocks):  # the end of a prefix ages first
            self._cache[block] = None
            self._cache.move_to_end(block)
        while len(self._cache) > self._num_blocks:
            self._cache.popitem(last=False)


def imbalance(workers: Iterable[SimWorker]) -> float:
    """Tokens computed: the most of one worker, by the mean."""
    computed = [worker.num_computed for worker in workers]
    return max(computed) * len(computed) / max(1, sum(computed))
