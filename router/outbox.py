"""What several tasks have for one reader, who takes all that is there at a time.

Unbounded: who fills it says how much that can be. Like `asyncio.Queue`, for a third of its cost,
which is paid once a token.
"""

import asyncio
from typing import Generic, TypeVar

T = TypeVar("T")


class Outbox(Generic[T]):
    def __init__(self) -> None:
        self._items: list[T] = []
        self._arrived: asyncio.Future[None] | None = None
        """While the reader waits."""

    def put(self, item: T) -> None:
        self._items.append(item)
        if self._arrived is not None and not self._arrived.done():
            self._arrived.set_result(None)

    async def take(self) -> list[T]:
        """All that has come, in order; at least one. One reader."""
        while not self._items:
            self._arrived = asyncio.get_running_loop().create_future()
            try:
                await self._arrived
            finally:
                self._arrived = None
        return self.take_now()

    def take_now(self) -> list[T]:
        """All that is there; perhaps nothing."""
        items, self._items = self._items, []
        return items
