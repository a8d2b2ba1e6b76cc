"""`GET /v1/cluster/events`: the cluster as server-sent events, one producer for all who watch.

1. `viewing` takes a viewer in; there is a bound. With the first one the producer starts.
2. A few times a second it reads each topic; one whose text has changed gets a new version.
3. A viewer is sent the newest version of each topic that it has not had, whole: one that reads
   slowly misses what was between, and delays nobody. While nothing changes, a comment tells now
   and then that the router is there.
4. With the last viewer the producer ends. `close` ends all viewers with `bye`.

Nothing of it is on the way of a request, and without viewers nothing happens at all.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import contextmanager
from http import HTTPStatus

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from router.body import Connection, connection_of
from router.errors import ApiError, Disconnected, ShuttingDown
from router.exchange import send_in_time, while_connected

TICK_S = 0.25
QUIET_S = 2.0
"""After so much silence a viewer is told that there is nothing to tell."""


class TooManyViewers(ApiError):
    def __init__(self, limit: int) -> None:
        super().__init__(
            HTTPStatus.SERVICE_UNAVAILABLE,
            f"{limit} viewers watch the cluster already (--max-viewers).",
            code="too_many_viewers",
            headers={"Retry-After": "5"},
        )


class ClusterFeed:
    """See the module. Made inside the running loop."""

    def __init__(self, topics: Mapping[str, Callable[[], str]], max_viewers: int) -> None:
        """`topics`: what to call for the JSON of each, in one line."""
        self._topics = topics
        self._max_viewers = max_viewers
        self._texts: dict[str, str] = {}
        self._versions = dict.fromkeys(topics, 0)
        self._changed = asyncio.Event()
        self._producer: asyncio.Task[None] | None = None
        self._is_closed = False
        self.num_viewers = 0

    @contextmanager
    def viewing(self) -> Iterator[None]:
        """Raises TooManyViewers, ShuttingDown."""
        if self._is_closed:
            raise ShuttingDown
        if self.num_viewers >= self._max_viewers:
            raise TooManyViewers(self._max_viewers)
        self.num_viewers += 1
        if self._producer is None:
            self._producer = asyncio.create_task(self._produce())
            self._producer.add_done_callback(lambda producer: self._wake())
        try:
            yield
        finally:
            self.num_viewers -= 1
            if not self.num_viewers:
                self._producer.cancel()
                self._producer = None

    async def events(self) -> AsyncIterator[bytes]:
        """For one viewer; endless until `close`."""
        had = dict.fromkeys(self._topics, 0)
        while not self._is_closed:
            if self._producer is not None and self._producer.done():
                self._producer.result()  # a bug of ours: raised where it is logged
            changed = self._changed
            news = [topic for topic, version in self._versions.items() if version > had[topic]]
            if news:
                had.update((topic, self._versions[topic]) for topic in news)
                yield b"".join(_event(topic, self._texts[topic]) for topic in news)
                continue
            try:
                async with asyncio.timeout(QUIET_S):
                    await changed.wait()
            except TimeoutError:
                yield b":\n\n"
        yield _event("bye", "{}")

    def close(self) -> None:
        """Nobody is taken in any more."""
        self._is_closed = True
        self._wake()

    async def _produce(self) -> None:
        while True:
            now = {topic: read() for topic, read in self._topics.items()}
            changed = [topic for topic, text in now.items() if text != self._texts.get(topic)]
            for topic in changed:
                self._texts[topic] = now[topic]
                self._versions[topic] += 1
            if changed:
                self._wake()
            await asyncio.sleep(TICK_S)

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


class FeedResponse(Response):
    """One viewer's, until it leaves or takes nothing any more."""

    def __init__(self, feed: ClusterFeed, send_timeout_s: float) -> None:
        super().__init__()
        self._feed = feed
        self._send_timeout_s = send_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._feed.viewing():
            try:
                await while_connected(receive, self._send_all(send, connection_of(scope)))
            except Disconnected:
                return

    async def _send_all(self, send: Send, connection: Connection | None) -> None:
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-store"),
            (b"x-accel-buffering", b"no"),
        ]

        async def put(message: Message) -> None:
            await send_in_time(send, message, self._send_timeout_s, connection)

        await put({"type": "http.response.start", "status": HTTPStatus.OK, "headers": headers})
        async for event in self._feed.events():
            await put({"type": "http.response.body", "body": event, "more_body": True})
        await put({"type": "http.response.body", "body": b"", "more_body": False})


def _event(topic: str, text: str) -> bytes:
    return f"event: {topic}\ndata: {text}\n\n".encode()
