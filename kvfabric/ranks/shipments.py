"""Sending with several ranks: what rank 0 has another rank ship. Rank 0's loop.

1. `begin` enters the lender, so that the blocks stay the request's for that rank, and tells it to
   ship; the rank has no block table of its own, so each `extend` takes the block ids along.
2. The rank says once how it ended; by then it copies nothing any more, and the lender is left.
"""

import asyncio
from collections.abc import Callable, Sequence

from kvfabric.errors import DeadlineExceeded, FabricError, PeerLost, TransferAborted
from kvfabric.ranks.member import ANSWER_SECONDS, Member
from kvfabric.ranks.messages import (
    Cancel,
    Commit,
    Extend,
    NotShipped,
    Ship,
    Shipped,
    error_of,
)
from kvfabric.shipment import Shipment
from kvfabric.ticket import BlockLender, ShipReport, Ticket


class MemberShipment(Shipment):
    """What one other rank sends of a transfer."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        member: Member,
        number: int,
        ticket: Ticket,
        lender: BlockLender,
    ) -> None:
        super().__init__()
        self.member = member
        self.number = number
        self._loop = loop
        self._ticket = ticket
        self._lender = lender
        self._block_table: Sequence[int] | None = None
        """As long as the lender is entered; grows as the request does."""
        self._num_blocks_told = 0
        self._extents: list[tuple[int, int | None]] = []
        """That the rank has not been told of."""
        self._is_committed = False
        self._deadline: asyncio.TimerHandle | None = None

    @property
    def is_lent(self) -> bool:
        """The rank has been told to ship, and has not said yet how it ended."""
        return self._block_table is not None

    def extend(self, num_tokens: int, num_layers: int | None = None) -> None:
        self._call(self._extend, num_tokens, num_layers)

    def commit(self, payload: bytes) -> None:
        self._call(self._commit)

    def cancel(self) -> None:
        self._call(self._cancel)

    async def begin(self) -> None:
        try:
            block_table = await self._lender.enter()
        except FabricError as error:
            self.fail(error)
            return
        if self.done.done() or self.member.is_gone:
            self._lender.exit()
            self.fail(_gone(self.member))
            return
        self._block_table = block_table
        self.member.tell(Ship(self.number, self._ticket, self._untold_blocks()))
        self._tell_extents()
        if self._is_committed:
            self.member.tell(Commit(self.number))

    def on_end(self, outcome: Shipped | NotShipped) -> None:
        """The rank is done with the blocks."""
        self._leave()
        if isinstance(outcome, NotShipped):
            self.fail(error_of(outcome.error, outcome.reason))
        elif not self.done.done():
            self._finish(outcome.report)

    def on_gone(self) -> None:
        """The rank has ended, and copies nothing any more."""
        self._leave()
        self.fail(_gone(self.member))

    def fail(self, error: FabricError) -> None:
        """Nobody waits any longer; the blocks stay lent until the rank is done with them."""
        if not self.done.done():
            self._finish(error)

    def _call(self, function: Callable[..., None], *args: object) -> None:
        try:
            self._loop.call_soon_threadsafe(function, *args)
        except RuntimeError:
            assert self._loop.is_closed()  # the fabric closed first, and has failed `done`

    def _extend(self, num_tokens: int, num_layers: int | None) -> None:
        self._extents.append((num_tokens, num_layers))
        if self._block_table is not None:
            self._tell_extents()

    def _tell_extents(self) -> None:
        for num_tokens, num_layers in self._extents:
            self.member.tell(Extend(self.number, num_tokens, num_layers, self._untold_blocks()))
        self._extents.clear()

    def _commit(self) -> None:
        self._is_committed = True
        if self._block_table is not None:
            self.member.tell(Commit(self.number))

    def _cancel(self) -> None:
        if self.done.done() or self._deadline is not None:
            return
        if self._block_table is None:
            self.fail(TransferAborted("cancelled here"))
            return
        self.member.tell(Cancel(self.number))
        silent = DeadlineExceeded(f"rank {self.member.rank} does not end its part of a transfer")
        self._deadline = self._loop.call_later(ANSWER_SECONDS, self.fail, silent)

    def _untold_blocks(self) -> list[int]:
        assert self._block_table is not None
        untold = list(self._block_table[self._num_blocks_told :])
        self._num_blocks_told += len(untold)
        return untold

    def _leave(self) -> None:
        if self._block_table is not None:
            self._block_table = None
            self._lender.exit()

    def _finish(self, outcome: ShipReport | FabricError) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        if isinstance(outcome, FabricError):
            self.done.set_exception(outcome)
        else:
            self.done.set_result(outcome)


def _gone(member: Member) -> PeerLost:
    return PeerLost(f"rank {member.rank} of this worker is gone")
