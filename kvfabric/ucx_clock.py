"""A clock for ucxx's progress thread that ticks only while there is something to do.

ucxx submits what it is asked for on that thread, and wakes it; but a wake-up that comes between its
look at the queue and its next sleep is lost, so it sleeps for a millisecond at the most. A sender
whose peer's shared memory queue is full depends on that too: nothing tells it of room. Looking
around a thousand times a second takes 2.4 % of a core. So here it sleeps for longer, and the event
loop wakes it while messages are under way, and for a while after whatever was asked of UCX: each
millisecond at first, then less and less often, for each tick takes the two threads' time from
whoever computes on their cores. Knows no ucxx.
"""

import asyncio
import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvfabric.ucx_lanes import libucp

IDLE_MS = 10
"""How long the thread sleeps: what a lost wake-up costs that the clock does not know of."""

_TICK_S, _SLOWEST_TICK_S = 0.001, 0.008
_TAIL_S = IDLE_MS / 1000
"""After whatever was asked; from then on the thread looks around as often by itself."""
_TICK_PER_AGE = 1.0
"""A tick, of the time since the last that was begun, ended or asked for."""


def signaller(worker_handle: int) -> Callable[[], object] | None:
    """Wakes the progress thread of a `ucp_worker_h`, from any thread; None if UCX cannot be
    asked to."""
    library = libucp()
    if library is None:
        return None
    return lambda: library.ucp_worker_signal(ctypes.c_void_p(worker_handle))


class Clock:
    """See the module. Of one event loop, and on it."""

    def __init__(self, wake: Callable[[], object]) -> None:
        self._wake = wake
        self._loop = asyncio.get_running_loop()
        self._num_under_way = 0
        self._wound_at = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def wind(self) -> None:
        """Something was asked of UCX."""
        self._wound_at = self._loop.time()
        if self._timer is None or self._timer.when() > self._wound_at + _TICK_S:
            self._set(_TICK_S)

    def begin(self) -> None:
        """Something that lasts until `end`."""
        self._num_under_way += 1
        self.wind()

    def end(self) -> None:
        self._num_under_way -= 1
        self.wind()

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _set(self, seconds: float) -> None:
        self.stop()
        self._timer = self._loop.call_later(seconds, self._tick)

    def _tick(self) -> None:
        self._wake()
        age = self._loop.time() - self._wound_at
        if self._num_under_way or age < _TAIL_S:
            self._set(min(max(_TICK_S, _TICK_PER_AGE * age), _SLOWEST_TICK_S))
        else:
            self._timer = None


@contextmanager
def under_way(clock: Clock | None) -> Iterator[None]:
    """Something that lasts as long as this."""
    if clock is None:
        yield
        return
    clock.begin()
    try:
        yield
    finally:
        clock.end()
