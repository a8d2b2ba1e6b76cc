"""Pace: a receiver that has better things to do takes in frames for a share of its time only.

Receiving and installing a frame costs CPU time on the cores of whoever serves streams at the same
time. So a frame is followed by a pause in proportion to what it took: of a core's time the frames
get `share`, however many transfers come and however fast the network is. The sender waits, as it
does for slots. Time is measured, not assumed: that of the calling thread, and `copied_s`.

A transfer that is complete lets somebody join the streams, and the step in which he does is the
longest of all: its KV is read for the first time. No frame comes beside that one.
"""

import asyncio
import time
from collections.abc import Callable

_WEIGHT = 0.3
"""Of the newest frame, in what the next is expected to take."""


class Pace:
    """See the module. Belongs to one event loop. Each frame: `turn`, `begin`, `done`."""

    def __init__(
        self,
        share: Callable[[], float | None],
        copied_s: Callable[[], float],
        join_s: Callable[[], float] = lambda: 0.0,
        clock: Callable[[], float] = time.monotonic,
        own_s: Callable[[], float] = time.thread_time,
    ) -> None:
        """`share`, above 0, as of now; None: there is nothing to be considerate of. `copied_s`: CPU
        seconds that other threads have spent on frames so far. `join_s`: from the end of a transfer
        until whoever it is of has joined."""
        self._share = share
        self._copied_s = copied_s
        self._join_s = join_s
        self._joined_at = 0.0
        self._clock = clock
        self._own_s = own_s
        self._turns = asyncio.Lock()  # connections wait in line
        self._free_at = 0.0
        self._under_way = 0
        self._spent_s = 0.0  # when the last frame was done, or the first was begun
        self._expected_s = 0.0

    @property
    def is_on(self) -> bool:
        return self._share() is not None

    async def turn(self) -> None:
        """Until a frame may be taken in."""
        async with self._turns:
            if (pause_s := self.pause_s()) > 0:
                await asyncio.sleep(pause_s)  # for nothing but the time

    def pause_s(self) -> float:
        """How long none may be; not above 0: one may."""
        return max(self._free_at, self._joined_at) - self._clock() if self.is_on else 0.0

    def begin(self) -> float:
        """One is, and what such a one takes is charged already: another connection may ask. `done`
        wants to be told how much."""
        if not self._under_way:
            self._spent_s = self._own_s() + self._copied_s()
        self._under_way += 1
        self._free_at = max(self._free_at, self._clock())  # what was not used is not saved up
        self._charge(self._expected_s)
        return self._expected_s

    def done(self, charged_s: float) -> None:
        """It is installed, or has not come."""
        self._under_way -= 1
        spent_s = self._own_s() + self._copied_s()
        took_s, self._spent_s = spent_s - self._spent_s, spent_s
        self._charge(took_s - charged_s)
        self._expected_s += _WEIGHT * (took_s - self._expected_s)

    def complete(self) -> None:
        """A transfer is."""
        self._joined_at = max(self._joined_at, self._clock() + self._join_s())

    def _charge(self, seconds: float) -> None:
        share = self._share()
        if share is not None:
            self._free_at += seconds / share
