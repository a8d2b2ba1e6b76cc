"""What a prompt waits for between two attempts, and when it has waited enough.

After a failure: the pause, within the bounds of router/retry.py. While all prefill queues are full:
a place in the line (router/queue_line.py), holding nothing of anybody.
"""

import asyncio
import random
import time
from collections.abc import Callable, Sequence

from router.config import RouterConfig
from router.errors import LegFailed, NoRetryLeft, Overloaded, QueueFull, RouterError, WorkersFailed
from router.progress import Progress
from router.queue_line import QueueLine
from router.retry import Attempts, RetryBudget
from router.workers import PrefillWorker, WorkerSet


class Patience:
    """Of all prompts of a router."""

    def __init__(self, workers: WorkerSet, config: RouterConfig) -> None:
        self._line = QueueLine(workers)
        self._queue_wait_s = config.queue_wait_s
        self._budget = RetryBudget(
            ratio=config.retry_ratio,
            reserve_per_s=config.retry_reserve_per_s,
            capacity=10 * config.retry_reserve_per_s,
        )

    @property
    def num_in_line(self) -> int:
        return len(self._line)

    def note_prompt(self) -> None:
        """One has come."""
        self._budget.note_prompt(time.monotonic())

    async def for_retry(self, progress: Progress, attempts: Attempts, last: RouterError) -> None:
        """Until another attempt may be made. Raises WorkersFailed, NoRetryLeft."""
        if attempts.are_over:
            raise WorkersFailed(attempts.num_in_all, last)
        is_planned = isinstance(last, LegFailed) and last.is_goodbye
        may_retry = is_planned or self._budget.take(time.monotonic())
        if not may_retry and not progress.has_tokens:
            raise NoRetryLeft(last)
        await asyncio.sleep(attempts.pause_s(random.random()))

    async def for_room(
        self,
        progress: Progress,
        full: QueueFull,
        candidates: Callable[[], Sequence[PrefillWorker]],
    ) -> None:
        """Until one of them may have room. Raises Overloaded when it has waited too long in all,
        for its turn (router/lobby.py) too. Not where the client has tokens: it would feel the wait
        more than others feel a prompt on decode."""
        if progress.has_tokens:
            progress.is_for_decode_alone = True
            return
        began_ns = time.monotonic_ns()
        may_try = await self._line.wait(
            progress.full_queues,
            candidates,
            max(0.0, self._queue_wait_s - progress.record.waited_s),
        )
        progress.record.waited(began_ns)
        if not may_try:
            raise Overloaded(self._queue_wait_s, full.retry_after_s)
