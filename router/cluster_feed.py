"""`GET /v1/cluster/events`: the cluster as server-sent events, one producer for all who watch.

1. `viewing` takes a viewer in; there is a bound. With the first one the producer starts.
2. A few times a second it reads each topic, and those of one tenant only for each tenant that
   watches; a text that has changed is a new version.
3. A viewer is sent the newest version of each topic that it has not had, whole: one that reads
   slowly misses what was between, and delays nobody. While nothing changes, a comment tells now
   and then that the router is there.
4. With the last viewer the producer ends. `close` ends all viewers with `bye`.

Nothing of it is on the way of a request, and without viewers nothing happens at all.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import contextmanager
from http import HTTPStatus
from typing import NamedTuple

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from router.errors import ApiError, Disconnected, ShuttingDown
from router.exchange import while_connected

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


class _News(NamedTuple):
    """The newest version of a topic, for those of an audience."""

    version: int
    text: str


class ClusterFeed:
    """See the module. Made inside the running loop."""

    def __init__(
        self,
        shared: Mapping[str, Callable[[], str]],
        own: Mapping[str, Callable[[str], str]],
        max_viewers: int,
    ) -> None:
        """Topics, and what to call for the JSON of each, in one line: of those that everybody is
        told alike, and of those that each audience is told of itself."""
        self._shared = shared
        self._own = own
        self._max_viewers = max_viewers
        self._news: dict[tuple[str, str], _News] = {}  # (audience or "", topic) →
        self._audiences: Counter[str] = Counter()
        self._version = 0
        self._changed = asyncio.Event()
        self._producer: asyncio.Task[None] | None = None
        self._is_closed = False

    @property
    def num_viewers(self) -> int:
        return self._audiences.total()

    @contextmanager
    def viewing(self, audience: str) -> Iterator[None]:
        """Raises TooManyViewers, ShuttingDown."""
        if self._is_closed:
            raise ShuttingDown
        if self.num_viewers >= self._max_viewers:
            raise TooManyViewers(self._max_viewers)
        self._audiences[audience] += 1
        if self._producer is None:
            self._producer = asyncio.create_task(self._produce())
            self._producer.add_done_callback(lambda producer: self._wake())
        try:
            yield
        finally:
            self._leave(audience)

    async def events(self, audience: str) -> AsyncIterator[bytes]:
        """For one viewer; endless until `close`."""
        had = 0
        while not self._is_closed:
            if self._producer is not None and self._producer.done():
                self._producer.result()  # a bug of ours: raised where it is logged
            changed, now = self._changed, self._version
            news = [
                _event(topic, one.text)
                for (of, topic), one in self._news.items()
                if of in ("", audience) and one.version > had
            ]
            had = now
            if news:
                yield b"".join(news)
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

    def _leave(self, audience: str) -> None:
        self._audiences[audience] -= 1
        self._audiences = +self._audiences
        if audience not in self._audiences:
            for topic in self._own:
                self._news.pop((audience, topic), None)
        if not self._audiences and self._producer is not None:
            self._producer.cancel()
            self._producer = None
            self._news.clear()

    async def _produce(self) -> None:
        while True:
            before = self._version
            for topic, read in self._shared.items():
                self._tell("", topic, read())
            for audience in self._audiences:
                for topic, read_own in self._own.items():
                    self._tell(audience, topic, read_own(audience))
            if self._version > before:
                self._wake()
            await asyncio.sleep(TICK_S)

    def _tell(self, audience: str, topic: str, text: str) -> None:
        known = self._news.get((audience, topic))
        if known is None or known.text != text:
            self._version += 1
            self._news[audience, topic] = _News(self._version, text)

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


class FeedResponse(Response):
    """One viewer's, until it leaves or takes nothing any more."""

    def __init__(self, feed: ClusterFeed, audience: str, send_timeout_s: float) -> None:
        super().__init__()
        self._feed = feed
        self._audience = audience
        self._send_timeout_s = send_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._feed.viewing(self._audience):
            try:
                await while_connected(receive, self._send_all(send))
            except Disconnected:
                return

    async def _send_all(self, send: Send) -> None:
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-store"),
            (b"x-accel-buffering", b"no"),
        ]
        try:
            await send({"type": "http.response.start", "status": HTTPStatus.OK, "headers": headers})
            async for event in self._feed.events(self._audience):
                async with asyncio.timeout(self._send_timeout_s):
                    await send({"type": "http.response.body", "body": event, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except (TimeoutError, OSError) as error:
            raise Disconnected("the viewer takes nothing any more") from error


def _event(topic: str, text: str) -> bytes:
    return f"event: {topic}\ndata: {text}\n\n".encode()
