"""What one router knows of the prompts that a worker has to compute before a new one. Pure.

The worker tells how long all of them take, and how it orders them (engine/prefill_order.py has the
rule: `fcfs`, or shortest remaining first, ageing by what has come since). Which of them this router
has sent it knows itself, at once, where the worker's word is late:

1. `add`: a prompt was sent, of so many tokens and seconds.
2. It is taken to be computed in the worker's order, at the predicted speed, from then on; it leaves
   when that is over, or when its first token has come.
3. `look`: what a prompt of so many tokens would find. What the worker tells beyond this router's
   own is other routers', and counts as before it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple


class Wait(NamedTuple):
    """What a new prompt finds."""

    ahead_s: float
    """Of those that are computed before it."""
    num_behind: int
    """That it would be computed before."""


@dataclass(slots=True)
class _Job:
    num_left: float
    """Tokens."""
    seconds: float
    num_arrived: int
    """Tokens that had come by then, its own included."""
    is_over: Callable[[], bool]


class PrefillQueue:
    """See the module. `ageing` 0: first come first served."""

    def __init__(self, ageing: float = 0.0) -> None:
        self.ageing = ageing
        self._jobs: list[_Job] = []
        self._num_arrived = 0
        self._now_s = 0.0

    def add(
        self,
        now_s: float,
        num_tokens: int,
        seconds: float,
        is_over: Callable[[], bool] = lambda: False,
    ) -> None:
        """`is_over`: its first token has come, or never will."""
        self._advance(now_s)
        self._num_arrived += num_tokens
        if seconds > 0:
            self._jobs.append(_Job(num_tokens, seconds, self._num_arrived, is_over))

    def look(self, now_s: float, num_tokens: int, told_s: float = 0.0) -> Wait:
        """Of a prompt of so many tokens that are not cached. `told_s`: what the worker said that
        all take that are there, as of now."""
        self._advance(now_s)
        ahead_s = total_s = 0.0
        num_behind = 0
        key = num_tokens + self.ageing * (self._num_arrived + num_tokens)
        for job in self._jobs:
            total_s += job.seconds
            if not self.ageing or self._key(job) <= key:
                ahead_s += job.seconds
            else:
                num_behind += 1
        return Wait(ahead_s + max(0.0, told_s - total_s), num_behind)

    def _key(self, job: _Job) -> float:
        return job.num_left + self.ageing * job.num_arrived

    def _advance(self, now_s: float) -> None:
        left_s, self._now_s = max(0.0, now_s - self._now_s), max(now_s, self._now_s)
        self._jobs = [job for job in self._jobs if not job.is_over()]
        while self._jobs and left_s > 0:
            job = min(self._jobs, key=self._key) if self.ageing else self._jobs[0]
            if job.seconds > left_s:
                job.num_left *= 1 - left_s / job.seconds
                job.seconds -= left_s
                return
            left_s -= job.seconds
            self._jobs.remove(job)
