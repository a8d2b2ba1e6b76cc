"""How many frames of a connection are handed to the network at once, and which is the next.

What is handed over goes in that order, whatever becomes ready behind it. So few are, and the others
wait here, packed, until it is their transfer's turn (turns.py). The next is handed over in the same
turn of the loop in which one is known to have been received: meanwhile the network has one less to
carry. Belongs to one event loop.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from kvfabric.outgoing import Outgoing
from kvfabric.turns import Turns

ON_WIRE = 2
"""One moves, the next is ready to. It is also what a short transfer finds before it, however much a
long one has to send."""

Post = Callable[[], asyncio.Future[None]]
"""Hands a message to the network; what it returns is done when it was received, or never will."""


@dataclass(frozen=True, slots=True, eq=False)
class _Waiter:
    nbytes: int
    post: Post
    posted: asyncio.Future[asyncio.Future[None]]


class WireWindow:
    """See the module."""

    def __init__(self, size: int, quantum: int) -> None:
        """Of so many frames; `quantum` of a turn, in bytes."""
        self._room = size
        self._turns: Turns[Outgoing] = Turns(quantum)
        self._waiters: dict[Outgoing, deque[_Waiter]] = {}

    def add(self, outgoing: Outgoing) -> None:
        """Its frames will come."""
        self._turns.add(outgoing)
        self._waiters[outgoing] = deque()

    def remove(self, outgoing: Outgoing) -> None:
        assert not self._waiters[outgoing], "a frame of it is still waiting"
        self._turns.remove(outgoing)
        del self._waiters[outgoing]

    async def post(self, outgoing: Outgoing, nbytes: int, post: Post) -> asyncio.Future[None]:
        """What `post` returns. Raises what the transfer has failed with meanwhile."""
        if self._room:  # then nobody is waiting
            if outgoing.error is not None:
                raise outgoing.error
            self._room -= 1
            self._turns.took(outgoing, nbytes)
            return self._posted(post)
        waiter = _Waiter(nbytes, post, asyncio.get_running_loop().create_future())
        self._waiters[outgoing].append(waiter)
        return await waiter.posted

    def close(self) -> None:
        """The connection is broken, and all transfers have failed: nobody waits any more."""
        for outgoing, waiters in self._waiters.items():
            while waiters:
                assert outgoing.error is not None
                waiters.popleft().posted.set_exception(outgoing.error)

    def _posted(self, post: Post) -> asyncio.Future[None]:
        sent = post()
        sent.add_done_callback(self._leave)
        return sent

    def _leave(self, _: asyncio.Future[None]) -> None:
        """One has been received, or never will."""
        while (outgoing := self._turns.next(self._waiting_nbytes)) is not None:
            waiter = self._waiters[outgoing].popleft()
            if outgoing.error is None:
                waiter.posted.set_result(self._posted(waiter.post))
                return
            waiter.posted.set_exception(outgoing.error)
        self._room += 1

    def _waiting_nbytes(self, outgoing: Outgoing) -> int | None:
        waiters = self._waiters[outgoing]
        return waiters[0].nbytes if waiters else None
