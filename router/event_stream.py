"""Reads a worker's stream of events, each within the inactivity deadline.

Workers send heartbeats from their engine's loop, so that silence means trouble, whatever pings
say; and where the worker's state has fallen silent too, it means trouble sooner (`OpenStreams`).
Leaving the context cancels the call, which gives up all it holds at the worker.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing, contextmanager
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
    """Read by one task. A timer of its own for each event would be a good part of a token's cost:
    one looks, now and then, how long the stream has been silent."""

    def __init__(
        self,
        worker: str,
        events: AsyncIterator[Event],
        inactivity_s: float,
        deadline: asyncio.Timeout,
    ) -> None:
        """`deadline` stands around all of the reading, and is never due unless this says so."""
        self._worker = worker
        self._events = events
        self._inactivity_s = inactivity_s
        self._deadline = deadline
        self._loop = asyncio.get_running_loop()
        self._awaits_since: float | None = None
        self._look = self._loop.call_later(inactivity_s, self._give_up_when_due)

    def close(self) -> None:
        self._look.cancel()

    def give_up_if_silent(self) -> None:
        if self._silent_s >= MISSED_HEARTBEATS_S:
            self._give_up()

    @property
    def _silent_s(self) -> float:
        """How long an event has been awaited."""
        return 0.0 if self._awaits_since is None else self._loop.time() - self._awaits_since

    def _give_up(self) -> None:
        if not self._deadline.expired():
            self._deadline.reschedule(self._loop.time())

    def _give_up_when_due(self) -> None:
        left_s = self._inactivity_s - self._silent_s
        if left_s > 0:
            self._look = self._loop.call_later(left_s, self._give_up_when_due)
        else:
            self._give_up()

    async def next(self) -> Event:
        """The next event. Raises LegFailed, at a proper end too: a caller leaves before that;
        or BadRequest."""
        self._awaits_since = self._loop.time()
        try:
            return await anext(self._events)
        except StopAsyncIteration as error:
            raise LegFailed(self._worker, "ended_early") from error
        except grpc.aio.AioRpcError as error:
            raise from_status(self._worker, error) from error
        finally:
            self._awaits_since = None


class ReadFrom(Protocol):
    """A worker, as far as its streams go."""

    streams: OpenStreams

    @property
    def name(self) -> str: ...


@asynccontextmanager
async def read_events(
    worker: ReadFrom, call: grpc.aio.UnaryStreamCall[Request, Event], inactivity_s: float
) -> AsyncIterator[EventStream[Event]]:
    """Raises LegFailed where a stream falls silent."""
    events = cast(AsyncGenerator[Event, None], aiter(call))
    deadline = asyncio.timeout(None)
    try:
        async with deadline:
            with (
                closing(EventStream(worker.name, events, inactivity_s, deadline)) as stream,
                worker.streams.reading(stream),
            ):
                yield stream
    except TimeoutError as error:
        if not deadline.expired():
            raise
        raise LegFailed(worker.name, "silent") from error
    finally:
        call.cancel()
        await events.aclose()
