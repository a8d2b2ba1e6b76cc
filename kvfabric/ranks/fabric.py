"""RankedFabric: the fabrics of all ranks of a worker, as its services see them: one `Fabric`.

Rank 0 receives and sends the KV of its own heads, as ever; each other rank has a fabric of its own,
with its own listener, staging and peers, and is told what to do over a socket. No KV passes from
rank to rank. What the ranks say to each other: kvfabric/ranks/messages.py; the other end of the
sockets is deploy/rank_handoff.py.
"""

import asyncio
import concurrent.futures
import socket
from collections.abc import Sequence
from dataclasses import replace
from itertools import count

from kvfabric.config import FabricConfig
from kvfabric.errors import FabricClosed, FabricError
from kvfabric.fabric import CLOSE_SECONDS, START_SECONDS, Fabric
from kvfabric.frame import TransferId
from kvfabric.node import Node, check_framable
from kvfabric.ranks.channel import RankChannel
from kvfabric.ranks.member import Member
from kvfabric.ranks.messages import (
    Claim,
    Counted,
    Expecting,
    Here,
    Lost,
    Message,
    NotShipped,
    Received,
    Released,
    Shipped,
)
from kvfabric.ranks.shipments import MemberShipment
from kvfabric.ranks.transfers import RankedTransfer, RankedTransfers
from kvfabric.shipment import RankShipments, Shipment, Shipments
from kvfabric.stats import FabricStats, LentSlot, added_up
from kvfabric.tasks import TaskSet
from kvfabric.ticket import BlockLender, FrameSink, FrameSource, KVShape, KVShard, Ticket


class RankedFabric(Fabric):
    """See the module. `ends`: the sockets to ranks 1, 2, …; the fabric's own from now on."""

    def __init__(
        self, config: FabricConfig, staging: memoryview, ends: Sequence[socket.socket]
    ) -> None:
        super().__init__(config, staging)
        self._ends = ends
        self._members: list[Member] = []
        self._numbers = count()
        # Made, and used from then on, on the loop:
        self._listening: TaskSet | None = None
        self._transfers: RankedTransfers | None = None
        self._shipping: dict[int, MemberShipment] = {}

    def start(self) -> None:
        """Raises `FabricError` if it cannot listen, or a rank does not say that it does."""
        super().start()
        self.call(self._meet()).result(timeout=START_SECONDS)

    def shards(self, shape: KVShape) -> tuple[KVShard, ...]:
        own = shape.shared_with(self._own_heads)
        return (*super().shards(own), *(member.shard for member in self._members))

    def expect(
        self, ticket: Ticket, shape: KVShape, sink: FrameSink, lender: BlockLender | None = None
    ) -> concurrent.futures.Future[None]:
        """Without a lender the others can do nothing: then rank 0 alone expects it."""
        if lender is None:
            return super().expect(ticket, shape, sink)
        assert self._transfers is not None
        check_framable(shape, self.config)
        transfer = RankedTransfer(self._transfers, ticket, sink, lender)
        self._call(self._transfers.expect, transfer, shape)
        return transfer.welcome

    def forget(self, transfer_id: TransferId) -> None:
        assert self._transfers is not None
        if not self._closed:
            self._call(self._transfers.forget, transfer_id)

    def give_up(self, transfer_id: TransferId) -> None:
        assert self._transfers is not None
        if not self._closed:
            self._call(self._transfers.give_up, transfer_id)

    def ship(
        self,
        ticket: Ticket,
        shape: KVShape,
        source: FrameSource,
        lender: BlockLender | None = None,
    ) -> Shipment:
        if lender is None:
            return super().ship(ticket, shape, source)
        check_framable(shape, self.config)
        own = self._outgoings(ticket, shape.shared_with(self._own_heads), source)
        others = [
            MemberShipment(self._loop, member, next(self._numbers), ticket, lender)
            for member in self._members
        ]
        shipment = RankShipments([own[0] if len(own) == 1 else Shipments(own), *others])
        for part in own:
            self._call(self._node.ship, part)
        for other in others:
            self._call(self._begin, other)
        return shipment

    def stats(self) -> FabricStats:
        """Of all ranks together; the others' are at most some moments old."""
        return added_up(self.rank_stats())

    def rank_stats(self) -> list[FabricStats]:
        return [super().stats(), *(member.stats for member in self._members)]

    @property
    def num_claims_under_way(self) -> int:
        """Of other ranks, for blocks that the lender has not given yet."""
        return 0 if self._transfers is None else self._transfers.num_claims_under_way

    @property
    def _own_heads(self) -> range:
        return range(self._members[0].shard.first_head)

    async def _meet(self) -> None:
        channels = []
        for rank, end in enumerate(self._ends, start=1):
            channel = await RankChannel.open(end)
            async with asyncio.timeout(START_SECONDS):
                here = await channel.receive()
            if not isinstance(here, Here):
                channel.close()
                raise FabricError(f"rank {rank} has no fabric to offer: {here}")
            self._members.append(Member(rank, channel, here))
            channels.append(channel)
        self._transfers = RankedTransfers(self._node, self._members, self._own_heads)
        self._listening = TaskSet()
        for member, channel in zip(self._members, channels, strict=True):
            self._listening.spawn(self._listen(member, channel))

    async def _listen(self, member: Member, channel: RankChannel) -> None:
        try:
            while (message := await channel.receive()) is not None:
                self._hear(member, message)
        finally:
            self._on_gone(member)

    def _hear(self, member: Member, message: Message) -> None:
        assert self._transfers is not None
        match message:
            case Counted(stats, lent):
                member.stats, member.lent = stats, lent
            case Expecting() | Claim() | Received() | Lost() | Released():
                self._transfers.hear(member, message)
            case Shipped(number) | NotShipped(number):
                self._shipping.pop(number).on_end(message)
            case _:
                raise AssertionError(f"rank {member.rank} never says {message}")

    def _begin(self, shipment: MemberShipment) -> None:
        assert self._listening is not None
        self._shipping[shipment.number] = shipment
        self._listening.spawn(self._shipped(shipment))

    async def _shipped(self, shipment: MemberShipment) -> None:
        await shipment.begin()
        if not shipment.is_lent:
            self._shipping.pop(shipment.number, None)

    def _on_gone(self, member: Member) -> None:
        """Its levels are nobody's now; its totals stay."""
        member.close()
        member.stats = replace(
            member.stats, send_slots_used=0, recv_slots_used=0, expected_transfers=0,
            outgoing_transfers=0, endpoints=0, transports=(),
        )  # fmt: skip
        member.lent = []
        assert self._transfers is not None
        self._transfers.on_gone(member)
        for shipment in [s for s in self._shipping.values() if s.member is member]:
            del self._shipping[shipment.number]
            shipment.on_gone()

    async def _lent(self) -> list[LentSlot]:
        """Of all ranks; the others' as they told them last."""
        return [*await super()._lent(), *(slot for m in self._members for slot in m.lent)]

    async def _shut(self, node: Node) -> None:
        if self._transfers is not None and self._listening is not None:
            await self._transfers.close(CLOSE_SECONDS)
            for member in self._members:
                self._on_gone(member)
            self._listening.cancel()
            await self._listening.join(CLOSE_SECONDS)
        for shipment in self._shipping.values():
            shipment.fail(FabricClosed("the fabric is closed"))
        await super()._shut(node)
