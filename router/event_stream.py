"""Reads a worker's stream of events, each within the inactivity deadline.

Workers send heartbeats from their engine's loop, so that silence means trouble, whatever pings
say. Leaving the context cancels the call, which gives up all it holds at the worker.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Generic, TypeVar, cast

import grpc

from router.errors import LegFailed, from_status

Request = TypeVar("Request")
Event = TypeVar("Event")


class EventStream(Generic[Event]):
    def __init__(self, worker: str, events: AsyncIterator[Event], inactivity_s: float) -> None:
        self._worker = worker
        self._events = events
        self._inactivity_s = inactivity_s

    async def next(self) -> Event:
        """The next event. Raises LegFailed, at a proper end too: a caller leaves before that;
        or BadRequest."""
        try:
            async with asyncio.timeout(self._inactivity_s):
                return await anext(self._events)
        except TimeoutError as error:
            raise LegFailed(self._worker, "silent") from error
        except StopAsyncIteration as error:
            raise LegFailed(self._worker, "ended_early") from error
        except grpc.aio.AioRpcError as error:
            raise from_status(self._worker, error) from error


@asynccontextmanager
async def read_events(
    worker: str, call: grpc.aio.UnaryStreamCall[Request, Event], inactivity_s: float
) -> AsyncIterator[EventStream[Event]]:
    events = cast(AsyncGenerator[Event, None], aiter(call))
    try:
        yield EventStream(worker, events, inactivity_s)
    finally:
        call.cancel()
        await events.aclose()
