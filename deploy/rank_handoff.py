"""A rank's end of the handoff: a fabric with its own listener, told what to do by rank 0's.

The other end of the socket is kvfabric/ranks/fabric.py; what the two say is in
kvfabric/ranks/messages.py. Everything here runs on the loop of this rank's fabric, but for the
copies. Block ids come from rank 0; a `KVLease` of this rank's own around them tells when the last
copy is over, so that rank 0 hears it once.

1. `rank_handoff` starts the fabric and tells rank 0 where it is and which heads it has.
2. Expect: the KV of these heads is received; the first frame asks rank 0 for the blocks.
3. Ship: the KV of these heads is sent to whoever of the receiver's processes wants some of them.
4. Rank 0 is gone, or this rank ends: all of it is given up.
"""

import asyncio
import logging
import socket
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace

from engine.errors import LeaseClosed
from engine.kv_codec import Codec
from engine.kv_copier import KVCopier
from engine.kv_lease import KVLease
from engine.request import BlockId, RequestId
from kvfabric.errors import FabricError
from kvfabric.fabric import Fabric
from kvfabric.frame import FrameRange, TransferId
from kvfabric.ranks.channel import RankChannel
from kvfabric.ranks.messages import (
    Blocks,
    Cancel,
    Claim,
    Commit,
    Counted,
    Expect,
    Expecting,
    Extend,
    Forget,
    GiveUp,
    Here,
    Lost,
    Message,
    NoBlocks,
    NotShipped,
    Received,
    Released,
    Ship,
    Shipped,
)
from kvfabric.shipment import Shipment
from kvfabric.stats import FabricStats, LentSlot
from kvfabric.ticket import KVShape, Packed, ReceiveReport, ShipReport

logger = logging.getLogger(__name__)

OPEN_SECONDS = 10.0
_COUNT_PERIOD_S = 0.25
"""Between two looks at this fabric's numbers; only those that have changed are told."""


@contextmanager
def rank_handoff(
    fabric: Fabric,
    copier: KVCopier,
    shape: KVShape,
    end: socket.socket,
    on_failure: Callable[[], None],
) -> Iterator["RankHandoff"]:
    """Serves rank 0 for as long as the block lives. `shape` has this rank's heads only; `end` of
    the socket to rank 0 and `fabric` are the handoff's own. `on_failure`, on the fabric's loop:
    it cannot go on, for a fault of ours. Raises `FabricError`."""
    fabric.start()
    handoff = RankHandoff(fabric, copier, shape, on_failure)
    try:
        serving = fabric.call(handoff.open(end)).result(OPEN_SECONDS)
        try:
            yield handoff
        finally:
            fabric.call(handoff.close(serving)).result(OPEN_SECONDS)
    finally:
        fabric.close()


class RankHandoff:
    """See the module."""

    def __init__(
        self, fabric: Fabric, copier: KVCopier, shape: KVShape, on_failure: Callable[[], None]
    ) -> None:
        self.shape = shape
        self._on_failure = on_failure
        self.copier = copier
        self._fabric = fabric
        self._sinks: dict[TransferId, RankSink] = {}
        self._shipping: dict[int, tuple[Shipment, RankSource]] = {}
        self._told: tuple[FabricStats, list[LentSlot]] | None = None

    async def open(self, end: socket.socket) -> "asyncio.Task[None]":
        self._loop = asyncio.get_running_loop()
        self._channel = await RankChannel.open(end)
        (shard,) = self._fabric.shards(self.shape)
        self._channel.send(Here(shard, self._fabric.stats()))
        self._count()
        return self._loop.create_task(self._serve())

    async def close(self, serving: "asyncio.Task[None]") -> None:
        self._give_all_up()
        self._counting.cancel()
        self._channel.close()
        await serving

    def tell(self, message: Message) -> None:
        """What is told is counted already."""
        self._tell_counted()
        self._channel.send(message)

    def tell_from_any_thread(self, message: Message) -> None:
        try:
            self._loop.call_soon_threadsafe(self.tell, message)
        except RuntimeError:
            assert self._loop.is_closed()  # this rank has ended, and rank 0 sees that

    def is_expected(self, transfer_id: TransferId) -> bool:
        return transfer_id in self._sinks

    def end(self, transfer_id: TransferId) -> None:
        sink = self._sinks.pop(transfer_id, None)
        if sink is not None:
            sink.close()

    async def _serve(self) -> None:
        try:
            while (message := await self._channel.receive()) is not None:
                self._do(message)
        except Exception:
            logger.exception("the rank's end of the handoff failed")
            self._on_failure()
        finally:  # rank 0 is gone, or has to see that we are
            self._give_all_up()
            self._channel.close()

    def _do(self, message: Message) -> None:
        match message:
            case Expect(ticket):
                sink = RankSink(self, ticket.transfer_id)
                self._sinks[ticket.transfer_id] = sink
                self._fabric.expect(ticket, self.shape, sink)
                self.tell(Expecting(ticket.transfer_id))
            case Forget(transfer_id):
                self._fabric.forget(transfer_id)
                self.end(transfer_id)
            case GiveUp(transfer_id):
                self._fabric.give_up(transfer_id)
            case Blocks(transfer_id, block_ids):
                self._on_blocks(transfer_id, block_ids)
            case NoBlocks(transfer_id, reason):
                if transfer_id in self._sinks:
                    self._sinks[transfer_id].refuse(reason)
            case Ship():
                self._ship(message)
            case Extend(number, num_tokens, num_layers, block_ids):
                if number in self._shipping:
                    shipment, source = self._shipping[number]
                    source.lease.block_table.extend(map(BlockId, block_ids))
                    shipment.extend(num_tokens, num_layers)
            case Commit(number):
                if number in self._shipping:
                    self._shipping[number][0].commit(b"")
            case Cancel(number):
                if number in self._shipping:
                    self._shipping[number][0].cancel()
            case _:
                raise AssertionError(f"rank 0 never says {message}")

    def _on_blocks(self, transfer_id: TransferId, block_ids: list[int]) -> None:
        """Each is answered by one Released."""
        released = Released(transfer_id)
        sink = self._sinks.get(transfer_id)
        if sink is None:
            self.tell(released)
        else:
            sink.grant(_lease(block_ids, lambda: self.tell_from_any_thread(released)))

    def _ship(self, order: Ship) -> None:
        number = order.number
        ended: Future[Message] = Future()
        lease = _lease(order.block_ids, lambda: self.tell_from_any_thread(ended.result()))
        source = RankSource(self, lease, order.ticket.codecs)
        shipment = self._fabric.ship(order.ticket, self.shape, source)
        self._shipping[number] = shipment, source

        def over(done: "Future[ShipReport]") -> None:
            """On the loop. Told when the last copy is over, which as a rule it is."""
            del self._shipping[number]
            error = done.exception()
            if error is None:
                ended.set_result(Shipped(number, done.result()))
            else:
                ended.set_result(NotShipped(number, type(error).__name__, str(error)))
            if lease.close():
                self.tell(ended.result())

        shipment.done.add_done_callback(over)

    def _give_all_up(self) -> None:
        for transfer_id in tuple(self._sinks):
            self._fabric.forget(transfer_id)
            self.end(transfer_id)
        for shipment, _ in self._shipping.values():
            shipment.cancel()

    def _count(self) -> None:
        self._tell_counted()
        self._counting = self._loop.call_later(_COUNT_PERIOD_S, self._count)

    def _tell_counted(self) -> None:
        stats = replace(self._fabric.stats(), loop_lag_s=0.0)  # it moves all the time
        lent = self._fabric.lent_here()
        if (stats, lent) != self._told:
            self._told = stats, lent
            self._channel.send(Counted(self._fabric.stats(), lent))


class RankSink:
    """The `FrameSink` of one transfer."""

    def __init__(self, handoff: RankHandoff, transfer_id: TransferId) -> None:
        self._handoff = handoff
        self._transfer_id = transfer_id
        self._granted: asyncio.Future[KVLease] | None = None
        """Asked for with the first frame."""
        self._copied_ns = 0

    async def install(self, frame: FrameRange, payload: memoryview, codec: int) -> None:
        if self._granted is None:
            self._granted = asyncio.get_running_loop().create_future()
            self._handoff.tell(Claim(self._transfer_id))
        lease = await asyncio.shield(self._granted)
        part = _local(frame, self._handoff.shape)
        scatter = self._handoff.copier.scatter(lease, part, payload, codec=Codec(codec))
        self._copied_ns += await asyncio.wrap_future(scatter)

    def committed(self, commit: bytes, report: ReceiveReport) -> None:
        self._end(Received(self._transfer_id, replace(report, install_ns=self._copied_ns)))

    def lost(self, error: FabricError, num_tokens: int) -> None:
        self._end(Lost(self._transfer_id, num_tokens, type(error).__name__, str(error)))

    def grant(self, lease: KVLease) -> None:
        assert self._granted is not None, "blocks are given to who asks"
        self._granted.set_result(lease)

    def refuse(self, reason: str) -> None:
        if self._granted is not None and not self._granted.done():
            self._granted.set_exception(LeaseClosed(reason))

    def close(self) -> None:
        """No copy begins any more. If none is under way, rank 0 hears so at once; else later."""
        self.refuse("the transfer is over")
        granted = self._granted
        if granted is not None and granted.exception() is None and granted.result().close():
            self._handoff.tell(Released(self._transfer_id))

    def _end(self, verdict: Message) -> None:
        """The verdict first: rank 0 hears how it ended before the blocks are back."""
        if self._handoff.is_expected(self._transfer_id):
            self._handoff.tell(verdict)
            self._handoff.end(self._transfer_id)


class RankSource:
    """The `FrameSource` of one shipment."""

    def __init__(self, handoff: RankHandoff, lease: KVLease, codecs: Sequence[int]) -> None:
        self.lease = lease
        self._handoff = handoff
        self._codecs = codecs

    async def pack(
        self, frame: FrameRange, out: memoryview, link_nbytes_per_s: float | None
    ) -> Packed:
        part, copier = _local(frame, self._handoff.shape), self._handoff.copier
        packing = copier.pack(self.lease, part, out, self._codecs, link_nbytes_per_s)
        return Packed(*await asyncio.wrap_future(packing))


def _lease(block_ids: list[int], on_drained: Callable[[], None]) -> KVLease:
    """Rank 0 has entered the request's own lease for it."""
    return KVLease(RequestId("of rank 0"), [*map(BlockId, block_ids)], lambda _: on_drained())


def _local(frame: FrameRange, shape: KVShape) -> FrameRange:
    """The wire names the model's heads; this rank's KV begins with its first."""
    return replace(frame, first_head=frame.first_head - shape.first_head)
