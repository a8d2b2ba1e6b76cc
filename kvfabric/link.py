"""Link: the sending end of one connection, shared by all transfers to one peer process.

1. Connect, shake hands. Transfers may queue frames meanwhile.
2. Take a send slot, take a frame of the transfer whose turn it is (turns.py), fill it, post it. A
   window keeps a few frames under way, so that packing, the network and installing overlap; only
   some of them are on the wire, so that what is packed later can still go before the rest.
3. OFFER tells the receiver how many frames to post receives for. It is said before the frames are
   packed and for several at once, so it costs no round trip and few messages.
4. When the connection breaks, every transfer on it fails and the link is over; the next `ship`
   makes a new one.

Every frame that was offered is followed by exactly one message: where a transfer is given up after
its frames were offered, VOID takes their place.
"""

import asyncio
from collections import OrderedDict
from itertools import count

from kvfabric.control import (
    CONTROL_NBYTES,
    Abort,
    AbortReason,
    Hello,
    Offer,
    Paced,
    Recall,
    decode_control,
    encode_control,
)
from kvfabric.deadline import Deadline, settled
from kvfabric.errors import BadFrame, DeadlineExceeded, FabricError, PeerLost, TransferAborted
from kvfabric.frame import (
    NO_RANGE,
    FrameHeader,
    FrameKind,
    FrameRange,
    TransferId,
    message_nbytes,
    write_frame,
)
from kvfabric.handshake import greet
from kvfabric.link_speed import LinkSpeed
from kvfabric.outgoing import Outgoing
from kvfabric.slots import Slot, SlotPool
from kvfabric.standing import LINGER_S, Standing
from kvfabric.stats import FabricCounters
from kvfabric.tasks import TaskSet, until_broken
from kvfabric.transport import Channel, Endpoint, Transport
from kvfabric.turns import Turns
from kvfabric.wire_window import ON_WIRE, WireWindow

WINDOW = 4
"""Frames under way on one connection: being packed, packed, or on the wire."""

OF_ONE_TRANSFER = 3
"""Of `WINDOW`: the rest is for one that comes later, to be packed while these are on their way."""

_USED_REMEMBERED = 1024

OFFER_AHEAD = 16
"""Frames on offer at most: more is fewer OFFERs, fewer is fewer VOIDs after a cancel."""


def _void_frame(number: int) -> memoryview:
    header = FrameHeader(FrameKind.VOID, TransferId(bytes(16)), 0, NO_RANGE, 0, None, number=number)
    return write_frame(header, memoryview(bytearray(message_nbytes(0))))


class Link:
    """One peer process, as a sender sees it."""

    def __init__(
        self,
        address: str,
        *,
        slots: SlotPool,
        counters: FabricCounters,
        connect_timeout_s: float,
        send_timeout_s: float,
    ) -> None:
        self.address = address
        self.endpoint: Endpoint | None = None
        self.speed = LinkSpeed()
        self._loop = asyncio.get_running_loop()
        self._clock = self._loop.time
        self._slots = slots
        self._counters = counters
        self._connect_timeout_s = connect_timeout_s
        self._send_timeout_s = send_timeout_s
        self._transfers: dict[TransferId, Outgoing] = {}
        self._used: OrderedDict[TransferId, None] = OrderedDict()
        self._turns: Turns[Outgoing] = Turns(slots.payload_nbytes)
        self._wire = WireWindow(ON_WIRE, slots.payload_nbytes)
        self._sending = Deadline(send_timeout_s)
        self._what = f"sending a frame to {address}"
        self._window = asyncio.Semaphore(min(WINDOW, slots.max_per_peer))
        self._changed = asyncio.Event()
        self._credit = 0  # frames offered, not yet popped
        self._standing = Standing()
        self._stale = self._loop.call_later(0, self._changed.set)  # to void those that stand
        self._frames = TaskSet()
        self._broken: asyncio.Future[FabricError] = self._loop.create_future()
        self._numbers = count()  # of the messages on FRAMES

    @property
    def over(self) -> bool:
        """Takes no more transfers."""
        return self._broken.done()

    def add(self, outgoing: Outgoing) -> None:
        assert not self.over
        if outgoing.ticket.transfer_id in self._used:
            error = TransferAborted("the ticket is used: it is good for one transfer")
            outgoing.fail(error, tell_peer=False)
            return
        self._used[outgoing.ticket.transfer_id] = None
        if len(self._used) > _USED_REMEMBERED:
            self._used.popitem(last=False)
        self._transfers[outgoing.ticket.transfer_id] = outgoing
        self._standing.began(self._clock())
        self._turns.add(outgoing)
        self._wire.add(outgoing)
        outgoing.on_change = lambda: self._on_change(outgoing)
        self._on_change(outgoing)  # it may have been extended, or have failed, before

    def break_off(self, error: FabricError) -> None:
        """Ends the connection and fails its transfers. Never blocks."""
        if self._broken.done():
            return
        self._broken.set_result(error)
        if self.endpoint is not None:
            self.endpoint.abort()
        for outgoing in tuple(self._transfers.values()):
            outgoing.fail(error, tell_peer=False)
        self._wire.close()

    async def run(self, transport: Transport, hello: Hello) -> None:
        """Returns when the connection is gone and its last slot is free again."""
        loops = TaskSet()
        loops.spawn(until_broken(self._connect(transport, hello, loops), self.break_off))
        await self._broken
        loops.cancel()
        self._stale.cancel()
        if self.endpoint is not None:
            self.endpoint.abort()
        await loops.join(self._connect_timeout_s)
        await self._frames.join(self._send_timeout_s)

    async def _connect(self, transport: Transport, hello: Hello, loops: TaskSet) -> None:
        self.endpoint = await transport.connect(self.address, self._connect_timeout_s)
        await greet(self.endpoint, hello, self._connect_timeout_s)
        for outgoing in tuple(self._transfers.values()):
            self._on_change(outgoing)
        loops.spawn(until_broken(self._read_control(self.endpoint), self.break_off))
        loops.spawn(until_broken(self._pump(self.endpoint), self.break_off))

    async def _read_control(self, endpoint: Endpoint) -> None:
        buffer = bytearray(CONTROL_NBYTES)
        while True:
            await endpoint.recv(Channel.CONTROL, buffer)  # idle for as long as nothing is wrong
            match decode_control(buffer):
                case Abort(transfer_id, reason):
                    outgoing = self._transfers.get(transfer_id)
                    if outgoing is not None:
                        error = TransferAborted(f"the receiver: {reason.name.lower()}")
                        outgoing.fail(error, tell_peer=False)
                case Paced(is_on):
                    self.speed.paced(is_on, self._clock())
                    self._standing.paced(is_on)
                    self._changed.set()
                case Recall():
                    self._standing.recalled()
                    self._changed.set()
                case other:
                    raise BadFrame(f"{other} from a receiver")

    async def _pump(self, endpoint: Endpoint) -> None:
        while True:
            while all(self._next_nbytes(outgoing) is None for outgoing in self._turns):
                self._settle_credit(endpoint)
                self._changed.clear()
                await self._changed.wait()
            await self._window.acquire()
            slot = await self._slots.acquire(self.address)
            outgoing = self._turns.next(self._next_nbytes)
            if outgoing is None:  # given up while we waited
                self._slots.release(slot)
                self._window.release()
                continue
            self._offer(endpoint, outgoing)
            self._credit -= 1
            self._frames.spawn(self._send(endpoint, outgoing, outgoing.pop(), slot))

    def _next_nbytes(self, outgoing: Outgoing) -> int | None:
        """Of the frame to be popped now, if there is one and it may be."""
        return outgoing.next_nbytes if outgoing.num_in_flight < OF_ONE_TRANSFER else None

    async def _send(
        self, endpoint: Endpoint, outgoing: Outgoing, frame: FrameRange | None, slot: Slot
    ) -> None:
        """Fills and sends one popped frame. Not cancelled: its slot is written or read by others
        until it ends."""
        slot.owner = outgoing.ticket.owner
        posted_s = 0.0

        def post() -> asyncio.Future[None]:
            nonlocal posted_s
            posted_s = self._clock()
            sent = endpoint.send(Channel.FRAMES, message)
            outgoing.posted()
            self._changed.set()  # COMMIT waits for this
            return sent

        sent = None
        try:
            outgoing.transports = endpoint.transports
            number, link_speed = self._next_number(), self.speed.nbytes_per_s
            message = await outgoing.fill(frame, slot, number, link_speed)
            if frame is None:  # COMMIT is next to nothing, and all that a transfer lacks
                sent = post()
            else:
                sent = await self._wire.post(outgoing, len(message) - message_nbytes(0), post)
        except FabricError as error:
            outgoing.fail(error)
            outgoing.not_posted()
            self._credit += 1  # offered and not sent: the next frame, or VOID, takes its place
        else:
            await self._delivered(sent, outgoing, posted_s, None if frame is None else len(message))
        if sent is None or await settled(sent, self._send_timeout_s):
            self._slots.release(slot)
        self._window.release()
        outgoing.slot_freed()
        self._changed.set()

    async def _delivered(
        self, sent: asyncio.Future[None], outgoing: Outgoing, posted_s: float, nbytes: int | None
    ) -> None:
        """`nbytes` of the message, if it is a frame of KV."""
        try:
            await self._sending.within(sent, self._what)
        except DeadlineExceeded as error:
            outgoing.fail(error, tell_peer=False)
            self.break_off(PeerLost(f"{self.address} took no frame in time"))
        except FabricError as error:
            self.break_off(error)
        else:
            if nbytes is not None:
                self.speed.received(nbytes, posted_s, self._clock())
                self._counters.sent_frames += 1
                self._counters.sent_nbytes += nbytes - message_nbytes(0)

    def _offer(self, endpoint: Endpoint, outgoing: Outgoing) -> None:
        """Called before a frame of `outgoing` is popped: keeps it and what follows in this window
        on offer."""
        if self._credit < WINDOW:
            more = min(self._num_offerable(), OFFER_AHEAD) - self._credit
            if more > 0:
                endpoint.send(Channel.CONTROL, encode_control(Offer(more)))
                self._credit += more
                outgoing.offers += 1

    def _settle_credit(self, endpoint: Endpoint) -> None:
        """Nothing can go now: on offer stay the frames that will come, and some that stand."""
        standing, to_come = self._standing.num_frames(self._clock()), self._num_offerable()
        for _ in range(self._credit - max(to_come, standing)):
            endpoint.send(Channel.FRAMES, _void_frame(self._next_number()))
            self._credit -= 1
        if not self._transfers and self._credit < standing:
            endpoint.send(Channel.CONTROL, encode_control(Offer(standing - self._credit)))
            self._credit = standing
        if self._credit > to_come:
            self._stale.cancel()
            self._stale = self._loop.call_later(LINGER_S, self._changed.set)

    def _next_number(self) -> int:
        return next(self._numbers) % 2**32

    def _num_offerable(self) -> int:
        return sum(outgoing.num_offerable for outgoing in self._turns)

    def _on_change(self, outgoing: Outgoing) -> None:
        self._changed.set()
        if outgoing.finished:
            self._retire(outgoing)

    def _retire(self, outgoing: Outgoing) -> None:
        """Forgets a finished transfer; if it failed here, the receiver hears of it."""
        if outgoing.tell_peer and self.endpoint is None and not self.over:
            return  # not connected yet: told afterwards
        if self._transfers.pop(outgoing.ticket.transfer_id, None) is None:
            return
        if outgoing.error is None:
            self._standing.ended(self._clock())
        self._turns.remove(outgoing)
        self._wire.remove(outgoing)
        if outgoing.tell_peer and self.endpoint is not None and not self.over:
            abort = Abort(outgoing.ticket.transfer_id, AbortReason.CANCELLED)
            self.endpoint.send(Channel.CONTROL, encode_control(abort))
