"""Where prompts wait when every prefill queue is full: in the router, holding nothing of anybody.

1. A prefill worker refuses a prompt (RESOURCE_EXHAUSTED): its `FullQueues` has it down as full,
   until a later state of it says that there is room.
2. When all that could serve it are full, the prompt gives its decode promise back and joins the
   line, for a bounded time.
3. Each state that tells of room lets the first few of the line try again; not all of them, for
   most would be refused again, and each try costs a promise and two calls.
"""

from collections import deque
from collections.abc import Callable, Iterable

from router.errors import QueueFull
from router.workers import PrefillWorker, WorkerSet

TRIES_A_ROUND = 8


class FullQueues:
    """The prefill workers that have refused one prompt."""

    def __init__(self) -> None:
        self._refused_at: dict[str, int] = {}  # address → statuses it had given by then
        self.retry_after_s = 0.0
        """What the last of them said."""

    def note(self, worker: PrefillWorker, refusal: QueueFull) -> None:
        self._refused_at[worker.address] = worker.num_refreshes
        self.retry_after_s = refusal.retry_after_s

    def has_room(self, worker: PrefillWorker) -> bool:
        """As far as is known."""
        refused_at = self._refused_at.get(worker.address)
        if refused_at is None:
            return True
        return worker.num_refreshes > refused_at and worker.has_queue_room


class QueueLine:
    """All prompts that wait, first come first served."""

    def __init__(self, workers: WorkerSet) -> None:
        self._workers = workers
        self._line: deque[object] = deque()
        self._round = 0
        self._num_tries = 0

    def __len__(self) -> int:
        return len(self._line)

    async def wait(
        self,
        full: FullQueues,
        candidates: Callable[[], Iterable[PrefillWorker]],
        timeout_s: float,
    ) -> bool:
        """True: try again; False: there was no room in that time."""
        place = object()
        self._line.append(place)

        def may_try() -> bool | None:
            ready = [worker for worker in candidates() if worker.is_ready]
            has_room = not ready or any(map(full.has_room, ready))
            return True if has_room and self._is_next(place) else None

        try:
            return await self._workers.wait_for(may_try, timeout_s) or False
        finally:
            self._line.remove(place)

    def _is_next(self, place: object) -> bool:
        this_round = sum(worker.num_refreshes for worker in self._workers.prefills)
        if this_round != self._round:
            self._round, self._num_tries = this_round, 0
        is_next = self._line[0] is place and self._num_tries < TRIES_A_ROUND
        self._num_tries += is_next
        return is_next
