"""Waiting for something outside the process, with a deadline and without ending it.

Timers are few: there are thousands of operations a second, and hardly one is ever late.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import TypeVar

from kvfabric.errors import DeadlineExceeded

_logger = logging.getLogger(__name__)

T = TypeVar("T")


class Deadline:
    """Of many operations, for each as long. They have one timer together. Belongs to one event
    loop."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._loop = asyncio.get_running_loop()
        self._waits: deque[tuple[float, asyncio.Future[None]]] = deque()  # the first is due first
        self._timer: asyncio.TimerHandle | None = None

    async def within(self, future: asyncio.Future[T], what: str) -> T:
        """The future's result; `DeadlineExceeded` if it takes longer. Neither the deadline nor a
        cancelled wait touches the future: whoever posted the operation still owns its end."""
        if not future.done():
            over: asyncio.Future[None] = self._loop.create_future()
            future.add_done_callback(lambda _: _end(over))
            self._watch(over)
            await over
        if not future.done():
            raise DeadlineExceeded(f"{what} took longer than {self.seconds:g} s")
        return future.result()

    def _watch(self, over: asyncio.Future[None]) -> None:
        while self._waits and self._waits[0][1].done():
            self._waits.popleft()
        self._waits.append((self._loop.time() + self.seconds, over))
        if self._timer is None:
            self._timer = self._loop.call_at(self._waits[0][0], self._look)

    def _look(self) -> None:
        now = self._loop.time()
        while self._waits and (self._waits[0][1].done() or self._waits[0][0] <= now):
            _end(self._waits.popleft()[1])
        due = self._waits[0][0] if self._waits else None
        self._timer = None if due is None else self._loop.call_at(due, self._look)


class Alarm:
    """Rings once when its time has come. To put it off costs next to nothing, and is what happens
    to it thousands of times a second: its timer finds out when it goes off too early. Belongs to
    one event loop."""

    def __init__(self, ring: Callable[[], None]) -> None:
        self._ring = ring
        self._loop = asyncio.get_running_loop()
        self._due_s: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._is_over = False

    def set(self, seconds: float) -> None:
        """From now, whatever was set before."""
        if self._is_over:
            return
        self._due_s = self._loop.time() + seconds
        if self._timer is None or self._timer.when() > self._due_s:
            self._arm(self._due_s)

    def stop(self) -> None:
        """It may be set again."""
        self._due_s = None

    def cancel(self) -> None:
        """For good; whom it would have told is not held any longer."""
        self._is_over, self._due_s, self._ring = True, None, _nobody
        if self._timer is not None:
            self._timer.cancel()

    def _arm(self, due_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(due_s, self._look)

    def _look(self) -> None:
        self._timer = None
        if self._due_s is None:
            return
        if self._loop.time() < self._due_s:
            self._arm(self._due_s)
        else:
            self._due_s = None
            self._ring()


def _nobody() -> None:
    pass


def _end(over: asyncio.Future[None]) -> None:
    if not over.done():
        over.set_result(None)


async def within(seconds: float, future: asyncio.Future[T], what: str) -> T:
    """As `Deadline.within`, for one operation."""
    await asyncio.wait((future,), timeout=seconds)
    if not future.done():
        raise DeadlineExceeded(f"{what} took longer than {seconds:g} s")
    return future.result()


async def settled(future: asyncio.Future[None], seconds: float) -> bool:
    """Whether an operation is over, however it ended, so that its buffer may be used again.

    The connection is aborted or the operation done when this is called, so it takes no time. If
    it still is not over, its buffer must be given up: the transport may write into it later.
    """
    if not future.done():
        await asyncio.wait((future,), timeout=seconds)
    if not future.done():
        _logger.error("the transport keeps a buffer; its slot is retired")
    return future.done()
