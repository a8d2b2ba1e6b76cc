"""Receiving with several ranks: one transfer is expected by each, and has one end. Rank 0's loop.

1. `expect` goes to every rank, under the same transfer id; each receives the KV of its own heads.
   The transfer is welcome when all have answered: before that its ticket must not be given away,
   or a quick sender's first frame finds a rank that knows nothing of it.
2. When a rank's first frame comes, it claims: the lender gives the block ids and keeps the blocks
   for that rank, until the rank has said Released, which it does once, however the transfer ends.
   Rank 0's own frames go to the sink.
3. Received by all: `committed`. Lost by one: the others give up, and the sink hears `lost` with the
   least that any of them has verified.
"""

import asyncio
import concurrent.futures
from collections.abc import Sequence

from kvfabric.errors import DeadlineExceeded, FabricClosed, FabricError, PeerLost, TransferAborted
from kvfabric.frame import FrameRange, TransferId
from kvfabric.node import Node
from kvfabric.ranks.member import ANSWER_SECONDS, Member
from kvfabric.ranks.messages import (
    Blocks,
    Claim,
    Expect,
    Expecting,
    Forget,
    GiveUp,
    Lost,
    NoBlocks,
    Received,
    Released,
    error_of,
)
from kvfabric.tasks import TaskSet
from kvfabric.ticket import (
    BlockLender,
    FrameSink,
    KVShape,
    ReceiveReport,
    Ticket,
    around,
)

GONE_SECONDS = 1.0
"""A transfer that is expected when a rank is gone is lost after this long, not at once: the worker
is about to end, and until it has, tickets would be minted and lost as fast as can be."""


class RankedTransfer:
    """One transfer, and the verdict of each rank so far. Rank 0's fabric takes it for the sink."""

    def __init__(
        self, owner: "RankedTransfers", ticket: Ticket, sink: FrameSink, lender: BlockLender
    ) -> None:
        self.ticket = ticket
        self.sink = sink
        self.lender = lender
        self.commit = b""
        self.received: dict[int, ReceiveReport] = {}
        self.verified: dict[int, int] = {}
        """Tokens that a rank which lost it has verified."""
        self.failure: FabricError | None = None
        self.welcome: concurrent.futures.Future[None] = concurrent.futures.Future()
        """Done when every rank expects it, or it is over."""
        self.unanswered: set[int] = set()
        """Ranks that have not said that they expect it."""
        self.deadline: asyncio.TimerHandle | None = None
        """For those who were told to give up."""
        self._owner = owner

    def answered(self, rank: int) -> None:
        self.unanswered.discard(rank)
        if not self.unanswered:
            self.over()

    def over(self) -> None:
        """There is nothing to wait for (any more)."""
        if not self.welcome.done():
            self.welcome.set_result(None)

    def has_heard(self, rank: int) -> bool:
        return rank in self.received or rank in self.verified

    async def install(self, frame: FrameRange, payload: memoryview, codec: int) -> None:
        await self.sink.install(frame, payload, codec)

    def committed(self, commit: bytes, report: ReceiveReport) -> None:
        self.commit = commit
        self._owner.on_received(self, 0, report)

    def lost(self, error: FabricError, num_tokens: int) -> None:
        self._owner.on_lost(self, 0, error, num_tokens)


class RankedTransfers:
    """See the module. All that are expected, by id, and what is lent to whom."""

    def __init__(self, node: Node, members: Sequence[Member], heads: range) -> None:
        """`heads` are rank 0's own."""
        self._node = node
        self._members = members
        self._heads = heads
        self._by_id: dict[TransferId, RankedTransfer] = {}
        self._lent: dict[tuple[int, TransferId], BlockLender] = {}
        self._lending = TaskSet()

    @property
    def num_claims_under_way(self) -> int:
        return len(self._lending)

    def expect(self, transfer: RankedTransfer, shape: KVShape) -> None:
        ticket = transfer.ticket
        self._by_id[ticket.transfer_id] = transfer
        transfer.unanswered = {member.rank for member in self._members}
        if any(member.is_gone for member in self._members):
            loop = asyncio.get_running_loop()
            transfer.deadline = loop.call_later(GONE_SECONDS, self._on_silence, transfer)
            transfer.over()
            return
        for member in self._members:
            member.tell(Expect(ticket))
        self._node.expect(ticket, shape.shared_with(self._heads), transfer)

    def forget(self, transfer_id: TransferId) -> None:
        self._node.forget(transfer_id)
        if (transfer := self._by_id.pop(transfer_id, None)) is not None:
            transfer.over()
            if transfer.deadline is not None:
                transfer.deadline.cancel()
            for member in self._members:
                member.tell(Forget(transfer_id))

    def give_up(self, transfer_id: TransferId) -> None:
        transfer = self._by_id.get(transfer_id)
        if transfer is not None:
            self._have_given_up(transfer)
        else:
            self._node.give_up(transfer_id)

    def hear(self, member: Member, message: Expecting | Claim | Received | Lost | Released) -> None:
        """From a rank; of a transfer that may be forgotten here."""
        transfer = self._by_id.get(message.transfer_id)
        match message:
            case Expecting() if transfer is not None:
                transfer.answered(member.rank)
            case Claim(transfer_id):
                if transfer is None:
                    member.tell(NoBlocks(transfer_id, "the transfer is over"))
                else:
                    self._lending.spawn(self._lend(member, transfer))
            case Released(transfer_id):
                self._lent.pop((member.rank, transfer_id)).exit()
            case Received(_, report) if transfer is not None:
                self.on_received(transfer, member.rank, report)
            case Lost(_, num_tokens, error, reason) if transfer is not None:
                self.on_lost(transfer, member.rank, error_of(error, reason), num_tokens)

    def on_gone(self, member: Member) -> None:
        """A rank has ended: it copies nothing any more, and will say no verdict."""
        for lent in [lent for lent in self._lent if lent[0] == member.rank]:
            self._lent.pop(lent).exit()
        for transfer in tuple(self._by_id.values()):
            self.on_lost(transfer, member.rank, _gone(member), transfer.ticket.first_token)

    def on_received(self, transfer: RankedTransfer, rank: int, report: ReceiveReport) -> None:
        if not transfer.has_heard(rank):
            transfer.received[rank] = report
            self._end_if_over(transfer)

    def on_lost(
        self, transfer: RankedTransfer, rank: int, error: FabricError, num_tokens: int
    ) -> None:
        if transfer.has_heard(rank):
            return
        transfer.verified[rank] = num_tokens
        if transfer.failure is None:
            transfer.failure = error
            self._have_given_up(transfer)
        self._end_if_over(transfer)

    async def close(self, seconds: float) -> None:
        """The other ranks are about to end, too: they are not waited for."""
        for transfer in tuple(self._by_id.values()):
            self.forget(transfer.ticket.transfer_id)
            transfer.sink.lost(FabricClosed("the fabric is closed"), transfer.ticket.first_token)
        self._lending.cancel()
        await self._lending.join(seconds)
        while self._lent:
            self._lent.popitem()[1].exit()

    async def _lend(self, member: Member, transfer: RankedTransfer) -> None:
        transfer_id = transfer.ticket.transfer_id
        try:
            block_ids = await transfer.lender.enter()
        except FabricError as error:
            member.tell(NoBlocks(transfer_id, str(error)))
            return
        if member.is_gone:
            transfer.lender.exit()
        else:
            self._lent[member.rank, transfer_id] = transfer.lender
            member.tell(Blocks(transfer_id, list(block_ids)))

    def _have_given_up(self, transfer: RankedTransfer) -> None:
        """All ranks that have not ended it; those that do not answer are not waited for long."""
        if transfer.deadline is not None:
            return
        transfer.deadline = asyncio.get_running_loop().call_later(
            ANSWER_SECONDS, self._on_silence, transfer
        )
        for member in self._members:
            if not transfer.has_heard(member.rank):
                member.tell(GiveUp(transfer.ticket.transfer_id))
        if not transfer.has_heard(0):
            self._node.give_up(transfer.ticket.transfer_id)

    def _on_silence(self, transfer: RankedTransfer) -> None:
        first_token = transfer.ticket.first_token
        for member in self._members:
            silent = DeadlineExceeded(f"rank {member.rank} says nothing")
            error = _gone(member) if member.is_gone else silent
            self.on_lost(transfer, member.rank, error, first_token)
        self.on_lost(transfer, 0, TransferAborted("given up here"), first_token)

    def _end_if_over(self, transfer: RankedTransfer) -> None:
        ranks = [0, *(member.rank for member in self._members)]
        if not all(map(transfer.has_heard, ranks)):
            return
        if transfer.deadline is not None:
            transfer.deadline.cancel()
        if self._by_id.pop(transfer.ticket.transfer_id, None) is None:
            return
        transfer.over()
        if transfer.failure is None:
            reports = [transfer.received[rank] for rank in ranks]
            transfer.sink.committed(transfer.commit, _slowest(reports))
        else:
            transfer.sink.lost(transfer.failure, min(transfer.verified.values()))


def _gone(member: Member) -> PeerLost:
    return PeerLost(f"rank {member.rank} of this worker is gone")


def _slowest(reports: Sequence[ReceiveReport]) -> ReceiveReport:
    """Ranks install beside each other: it took what the slowest took."""
    return ReceiveReport(
        install_ns=max(report.install_ns for report in reports),
        receive_ns=max(report.receive_ns for report in reports),
        nbytes=sum(report.nbytes for report in reports),
        frames=sum(report.frames for report in reports),
        install=around(report.install for report in reports),
        ranks=tuple(reports),
    )
