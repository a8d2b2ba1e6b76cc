"""How many frames of a connection are handed to the network at once, and which is the next.

What is handed over goes in that order, whatever becomes ready behind it. So few are, and the others
wait here, packed, until it is their transfer's turn (turns.py). Belongs to one event loop.
"""

import asyncio
from collections import deque

from kvfabric.outgoing import Outgoing
from kvfabric.turns import Turns


class WireWindow:
    """See the module. Whoever has entered leaves, also when the connection is broken: so nobody
    waits for ever."""

    def __init__(self, size: int, quantum: int) -> None:
        """Of so many frames; `quantum` of a turn, in bytes."""
        self._room = size
        self._turns: Turns[Outgoing] = Turns(quantum)
        self._waiters: dict[Outgoing, deque[tuple[int, asyncio.Future[None]]]] = {}

    def add(self, outgoing: Outgoing) -> None:
        """Its frames will come."""
        self._turns.add(outgoing)
        self._waiters[outgoing] = deque()

    def remove(self, outgoing: Outgoing) -> None:
        assert not self._waiters[outgoing], "a frame of it is still waiting"
        self._turns.remove(outgoing)
        del self._waiters[outgoing]

    async def enter(self, outgoing: Outgoing, nbytes: int) -> None:
        """Raises what the transfer has failed with meanwhile; then there is nothing to leave."""
        if self._room:  # then nobody is waiting
            self._room -= 1
            self._turns.took(outgoing, nbytes)
        else:
            entered: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters[outgoing].append((nbytes, entered))
            await entered
        if outgoing.error is not None:
            self.leave()
            raise outgoing.error

    def leave(self) -> None:
        outgoing = self._turns.next(self._waiting_nbytes)
        if outgoing is None:
            self._room += 1
        else:
            self._waiters[outgoing].popleft()[1].set_result(None)

    def _waiting_nbytes(self, outgoing: Outgoing) -> int | None:
        waiters = self._waiters[outgoing]
        return waiters[0][0] if waiters else None
