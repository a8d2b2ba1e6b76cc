"""Background tasks with an owner: none is forgotten, and none fails unseen."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from kvfabric.errors import FabricError

_logger = logging.getLogger(__name__)


class TaskSet:
    """Tasks that belong to one object. An exception in one is a bug of ours and is logged."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._finished)
        return task

    def cancel(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def join(self, seconds: float) -> bool:
        """Waits for all of them; False if some are still running after this long."""
        if not self._tasks:
            return True
        _, pending = await asyncio.wait(tuple(self._tasks), timeout=seconds)
        return not pending

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _logger.error("a task of the fabric failed", exc_info=error)


async def until_broken(
    work: Coroutine[Any, Any, None], break_off: Callable[[FabricError], None]
) -> None:
    """A loop of a connection: what ends it, be it a bug of ours, ends the connection."""
    try:
        await work
    except FabricError as error:
        break_off(error)
    except Exception as error:
        break_off(FabricError(f"a fault on this side: {error!r}"))
        raise


def end(future: asyncio.Future[None], error: FabricError | None = None) -> None:
    """An operation is over; whoever waited for it may have left. Of the future's loop."""
    if future.done():
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)
        future.exception()  # counts as retrieved: an abandoned operation is no news
