"""Reads a worker's stream of events, each within the inactivity deadline.

Workers send heartbeats from their engine's loop, so that silence means trouble, whatever pings
say; and where the worker's state has fallen silent too, it means trouble sooner (`OpenStreams`).
Leaving the context cancels the call, which gives up all it holds at the worker.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Generic, Protocol, TypeVar, cast

import grpc

from router.errors import LegFailed, from_status

Request = TypeVar("Request")
Event = TypeVar("Event")


MISSED_HEARTBEATS_S = 2.5
"""Heartbeats come every second."""


class OpenStreams:
    """Those that are being read from one worker."""

    def __init__(self) -> None:
        self._streams: set[EventStream[Any]] = set()

    @contextmanager
    def reading(self, stream: "EventStream[Any]") -> Iterator[None]:
        self._streams.add(stream)
        try:
            yield
        finally:
            self._streams.discard(stream)

    def give_up_silent(self) -> None:
        """The worker's state has fallen silent: so are those whose heartbeat is overdue."""
        for stream in self._streams:
            stream.give_up_if_silent()


class EventStream(Generic[Event]):
    def __init__(self, worker: str, events: AsyncIterator[Event], inactivity_s: float) -> None:
        self._worker = worker
        self._events = events
        self._inactivity_s = inactivity_s
        self._deadline: asyncio.Timeout | None = None  # while an event is awaited

    def give_up_if_silent(self) -> None:
        deadline = self._deadline
        if deadline is None or deadline.expired():
            return
        now, when = asyncio.get_running_loop().time(), deadline.when()
        if when is not None and now - (when - self._inactivity_s) >= MISSED_HEARTBEATS_S:
            deadline.reschedule(now)

    async def next(self) -> Event:
        """The next event. Raises LegFailed, at a proper end too: a caller leaves before that;
        or BadRequest."""
        try:
            async with asyncio.timeout(self._inactivity_s) as self._deadline:
                return await anext(self._events)
        except TimeoutError as error:
            raise LegFailed(self._worker, "silent") from error
        except StopAsyncIteration as error:
            raise LegFailed(self._worker, "ended_early") from error
        except grpc.aio.AioRpcError as error:
            raise from_status(self._worker, error) from error
        finally:
            self._deadline = None


class ReadFrom(Protocol):
    """A worker, as far as its streams go."""

    streams: OpenStreams

    @property
    def name(self) -> str: ...


@asynccontextmanager
async def read_events(
    worker: ReadFrom, call: grpc.aio.UnaryStreamCall[Request, Event], inactivity_s: float
) -> AsyncIterator[EventStream[Event]]:
    events = cast(AsyncGenerator[Event, None], aiter(call))
    stream = EventStream(worker.name, events, inactivity_s)
    try:
        with worker.streams.reading(stream):
            yield stream
    finally:
        call.cancel()
        await events.aclose()
