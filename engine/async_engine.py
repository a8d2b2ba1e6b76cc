"""The engine as a service's event loop sees it: one hand-over a step, one mailbox a request.

Knows asyncio, not gRPC. Life of a request:

1. `AsyncEngine.open(request, mailbox.put)` submits it; the `with` block is its lease.
2. Each step the engine thread hands all its events over in one `call_soon_threadsafe` (and those
   of a prompt's last layers, as they come); the loop puts each into the mailbox of its request.
3. Leaving the block aborts whatever is left; no event follows.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import Generic, TypeVar, cast

from engine.engine import Engine
from engine.request import EngineEvent, EngineRequest, RequestId, TokensOut

T = TypeVar("T")


class Mailbox(Generic[T]):
    """What one request hears, in order, from its engine and from whoever else its service asks.

    Output tokens that nobody has read yet coalesce into one event a sample, so that a slow reader
    costs one event of at most `max_tokens` token ids and never a growing queue. Loop thread only.
    """

    def __init__(self) -> None:
        self._items: deque[T] = deque()
        self._arrived: asyncio.Future[None] | None = None
        """While somebody waits."""
        self._wait_ends_s = 0.0
        self._look: asyncio.TimerHandle | None = None

    def put(self, item: T) -> None:
        if not (isinstance(item, TokensOut) and self._join(item)):
            self._items.append(item)
        self._wake()

    def _wake(self) -> None:
        if self._arrived is not None and not self._arrived.done():
            self._arrived.set_result(None)

    def _join(self, item: TokensOut) -> bool:
        """To earlier tokens of its sample, if nothing but tokens came since."""
        for index in range(len(self._items) - 1, -1, -1):
            earlier = self._items[index]
            if not isinstance(earlier, TokensOut):
                return False
            if earlier.sample == item.sample:
                self._items[index] = cast(T, _joined(earlier, item))
                return True
        return False

    async def next(self, timeout_s: float) -> T | None:
        """The next item, or None when none came in time. One reader at a time."""
        if not self._items:
            await self._wait(timeout_s)
        return self._items.popleft() if self._items else None

    async def _wait(self, timeout_s: float) -> None:
        """Most waits are for a token and far shorter than this: a timer is not made for each, one
        stands until it is due and then looks whether a wait is as old as that."""
        loop = asyncio.get_running_loop()
        self._arrived = loop.create_future()
        self._wait_ends_s = ends_s = loop.time() + timeout_s
        if self._look is not None and self._look.when() > ends_s:
            self._look.cancel()
            self._look = None
        if self._look is None:
            self._look = loop.call_at(ends_s, self._end_wait)
        try:
            await self._arrived
        finally:
            self._arrived = None

    def _end_wait(self) -> None:
        self._look = None
        loop = asyncio.get_running_loop()
        if self._arrived is None:
            return
        if loop.time() < self._wait_ends_s:
            self._look = loop.call_at(self._wait_ends_s, self._end_wait)
        else:
            self._wake()


def _joined(earlier: TokensOut, later: TokensOut) -> TokensOut:
    assert later.first_index == earlier.first_index + len(earlier.token_ids), (earlier, later)
    return TokensOut(
        request_id=earlier.request_id,
        first_index=earlier.first_index,
        token_ids=earlier.token_ids + later.token_ids,
        finish_reason=later.finish_reason,
        logprobs=earlier.logprobs + later.logprobs,
        sample=later.sample,
        scheduled_ns=earlier.scheduled_ns,
    )


def _goes_on(event: EngineEvent) -> bool:
    """It tells of nothing but more of the same."""
    return isinstance(event, TokensOut) and event.first_index > 0 and event.finish_reason is None


class AsyncEngine:
    """Delivers an engine's events into one event loop.

    `observe_wait` is told, once a step, the seconds between the engine's hand-over and the loop
    taking it: how busy the loop is. `on_failure` is called if the engine ends by itself.
    """

    def __init__(
        self,
        engine: Engine,
        observe_wait: Callable[[float], None],
        on_failure: Callable[[], None] = lambda: None,
    ) -> None:
        self.engine = engine
        self._observe_wait = observe_wait
        self._posts: dict[RequestId, Callable[[EngineEvent], None]] = {}
        self._loop = asyncio.get_running_loop()
        self.watchers: set[asyncio.Event] = set()
        """Set when a request comes or goes, and after each step that told something else than
        tokens of streams that go on."""
        engine.on_events = self._hand_over
        engine.on_failure = partial(self._call, on_failure)

    @contextmanager
    def open(
        self, request: EngineRequest, post: Callable[[EngineEvent], None]
    ) -> Iterator[Future[None]]:
        """Runs `request` for as long as the block lives; `post` hears its events, on the loop.
        Raises what `Engine.submit` raises, and gives the future that it returns."""
        assert request.request_id not in self._posts, request.request_id
        self._posts[request.request_id] = post
        try:
            submitted = self.engine.submit(request)
            self._wake_watchers()
            yield submitted
        finally:
            del self._posts[request.request_id]
            self.engine.abort(request.request_id)
            self._wake_watchers()

    @property
    def open_requests(self) -> frozenset[RequestId]:
        """Those whose block of `open` lives. Loop thread only."""
        return frozenset(self._posts)

    def _hand_over(self, events: list[EngineEvent]) -> None:
        """Engine thread, once a step."""
        self._call(self._deliver, events, time.monotonic())

    def _call(self, function: Callable[..., None], *arguments: object) -> None:
        """From the engine thread."""
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:  # the loop is closed: the process is ending, nobody listens
            return

    def _deliver(self, events: list[EngineEvent], handed_over: float) -> None:
        self._observe_wait(time.monotonic() - handed_over)
        for event in events:
            post = self._posts.get(event.request_id)
            if post is not None:
                post(event)
        if not all(map(_goes_on, events)):
            self._wake_watchers()

    def _wake_watchers(self) -> None:
        for changed in self.watchers:
            changed.set()
