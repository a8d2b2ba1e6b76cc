"""A worker's state, pushed to whoever watches it (`Watch` of both services). Service loop only.

1. The first message has everything; of the prefix cache what the watcher lacks, or all of it.
2. A request that comes or goes, or a step that begins or ends something, wakes the stream; a moment
   later it says what is new, so that a burst of changes is one message.
3. Steps that go on are told four times a second, and so is that nothing is new: silence means that
   the worker is gone. A message for each would cost a lone stream as much as its tokens.
4. `stop`: the last message says that the worker drains, and every stream ends.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable

from deploy.worker_status import WorkerStatus
from engine.async_engine import AsyncEngine
from protos import serving_pb2 as pb

PAUSE_S = 0.05
"""Between two messages, at least."""
SILENCE_S = 0.25
"""At most."""


class StateStream:
    """See the module."""

    def __init__(self, engine: AsyncEngine, status: WorkerStatus) -> None:
        self._engine = engine
        self._status = status
        self._is_stopping = False

    def wake(self) -> None:
        """Something has changed that is not the engine's."""
        for changed in self._engine.watchers:
            changed.set()

    def stop(self) -> None:
        self._is_stopping = True
        self.wake()

    async def watch(
        self,
        role: pb.Role.ValueType,
        request: pb.WatchRequest,
        write: Callable[[pb.WorkerState], Awaitable[None]],
    ) -> None:
        """One call; ends with `stop`, or when it is cancelled."""
        state = _Watched(self._engine, self._status, role, request)
        changed = asyncio.Event()
        self._engine.watchers.add(changed)
        try:
            while True:
                changed.clear()
                is_last = self._is_stopping
                await write(state.next())
                if is_last:
                    return
                await _wait(changed, SILENCE_S)
                if not self._is_stopping:
                    await asyncio.sleep(PAUSE_S)
        finally:
            self._engine.watchers.discard(changed)


class _Watched:
    """What one watcher has heard."""

    def __init__(
        self,
        engine: AsyncEngine,
        status: WorkerStatus,
        role: pb.Role.ValueType,
        request: pb.WatchRequest,
    ) -> None:
        self._engine = engine.engine
        self._status = status
        self._role = role
        knows_us = request.generation == status.generation
        self._next_change = request.next_change if knows_us else None
        self._turns = -1
        self._turned_s = time.monotonic()

    def next(self) -> pb.WorkerState:
        stats, now_s = self._engine.stats(), time.monotonic()
        if stats.turns != self._turns:
            self._turns, self._turned_s = stats.turns, now_s
        return pb.WorkerState(
            status=self._status(self._role),
            cache=self._cache(),
            steps=pb.StepTimes(
                weights=stats.step_cost.values(),
                work=stats.step_work,
                seconds=stats.step_seconds,
                knows_prefill=stats.knows_prefill,
            ),
            idle_ms=round((now_s - self._turned_s) * 1000),
        )

    def _cache(self) -> pb.CacheChanges | None:
        journal = self._engine.cache_journal
        if self._next_change == journal.next_change:
            return None
        changes = journal.since(self._next_change)
        self._next_change = changes.next
        return pb.CacheChanges(
            first_change=changes.first,
            next_change=changes.next,
            is_snapshot=changes.is_snapshot,
            stored=changes.stored,
            removed=changes.removed,
        )


async def _wait(event: asyncio.Event, timeout_s: float) -> None:
    """No longer than that."""
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return
