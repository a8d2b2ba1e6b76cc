"""The receiving end: one `Reception` per connection that a peer opened.

Life of a frame here:
1. OFFER says that frames will come; only then are slots taken, so an idle peer pins none. On a busy
   connection some stand ready (standing.py) until somebody else wants their slots.
2. A slot is acquired (the peer's cap and the budget hold the peer back: that is all the
   back-pressure there is, but for the pace of a process that is busy, and the peer is told when
   that begins and ends) and posted as a receive.
   Receives match in the order of the frames. A peer that offers and falls silent loses its
   connection, and its slots are free again.
3. The frame lands, header and payload, in its slot. The header is judged, the checksum verified.
4. The sink installs it; the slot is free again.

What is not wanted (unknown, late, heads that are another connection's) is dropped and answered with
ABORT. What is malformed breaks the connection, and with it the transfers it was sending.
A transfer that is lost leaves the connection and the other transfers alone.
"""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Coroutine

from kvfabric.checksum import Checksummer
from kvfabric.control import (
    CONTROL_NBYTES,
    Abort,
    AbortReason,
    Control,
    Offer,
    Paced,
    Recall,
    Welcome,
    decode_control,
    encode_control,
)
from kvfabric.deadline import Alarm, settled
from kvfabric.errors import (
    BadFrame,
    ChecksumMismatch,
    DeadlineExceeded,
    FabricError,
    InstallFailed,
    TransferAborted,
)
from kvfabric.frame import FrameHeader, FrameKind, TransferId, payload_view, read_frame
from kvfabric.handshake import answer
from kvfabric.incoming import Incoming, IncomingTransfers
from kvfabric.pace import Pace
from kvfabric.slots import Slot, SlotPool
from kvfabric.stats import FabricCounters
from kvfabric.tasks import TaskSet, until_broken
from kvfabric.ticket import Span
from kvfabric.transfer_part import Part, Verdict
from kvfabric.transport import Channel, Endpoint

MAX_OFFERED = 1024
"""Frames a peer may have on offer; far more than any of ours ever has."""

MAX_UNREAD = 64
"""Control messages that a peer lets lie."""

NUMBERS_REMEMBERED = 4 * MAX_OFFERED


class Reception:
    """One peer's frames, from HELLO to the break of the connection."""

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        incoming: IncomingTransfers,
        slots: SlotPool,
        checksummer: Checksummer,
        counters: FabricCounters,
        offer_timeout_s: float,
        install_timeout_s: float,
        pace: Pace | None = None,
    ) -> None:
        self.endpoint = endpoint
        self._incoming = incoming
        self._slots = slots
        self._checksummer = checksummer
        self._counters = counters
        self._offer_timeout_s = offer_timeout_s
        self._install_timeout_s = install_timeout_s
        self._silence = Alarm(self._fell_silent)  # of a peer that has frames on offer
        self._pace = pace
        self._is_paced = False  # as the peer knows
        self._peer = 0  # generation of the sending process: its connections share one cap
        self._owed = 0  # frames offered and not yet given a slot
        self._num_posted = 0  # frames offered that have one and have not come
        self._is_recalled = False  # those that only stand, as the peer knows
        self._numbers: OrderedDict[int, None] = OrderedDict()  # of the last messages
        self._offered = asyncio.Event()
        self._frames = TaskSet()
        self._unread: set[asyncio.Future[None]] = set()  # control messages on their way
        self._broken: asyncio.Future[FabricError] = asyncio.get_running_loop().create_future()

    async def run(self, welcome: Welcome, handshake_timeout_s: float) -> None:
        """Returns when the connection is gone and its last slot is free again."""
        loops = TaskSet()
        try:
            hello = await answer(self.endpoint, welcome, handshake_timeout_s)
            self._peer = hello.generation
            loops.spawn(until_broken(self._read_control(), self.break_off))
            loops.spawn(until_broken(self._post_receives(), self.break_off))
            error = await self._broken
        except FabricError as refusal:
            error = refusal
        self.endpoint.abort()
        self._silence.cancel()
        loops.cancel()
        self._incoming.lose_connection(self, error)
        await loops.join(self._install_timeout_s)
        await self._frames.join(self._install_timeout_s)

    def break_off(self, error: FabricError) -> None:
        """Ends the connection. Never blocks; `run` returns soon after."""
        if not self._broken.done():
            self._broken.set_result(error)
            self.endpoint.abort()

    def recall(self) -> None:
        """Somebody waits for a slot: one in which nothing is to come is to be given back."""
        if self._num_posted and not self._is_recalled:
            self._is_recalled = True
            self._say(Recall())

    async def _read_control(self) -> None:
        buffer = bytearray(CONTROL_NBYTES)
        while True:
            await self.endpoint.recv(Channel.CONTROL, buffer)  # idle for as long as the peer is
            match decode_control(buffer):
                case Offer(num_frames):
                    self._owed += num_frames
                    if self._owed > MAX_OFFERED:
                        raise BadFrame(f"the peer has {self._owed} frames on offer")
                    self._is_recalled = False
                    self._offered.set()
                case Abort(transfer_id, reason):
                    error = TransferAborted(f"the sender: {reason.name.lower()}")
                    self._incoming.aborted_by_sender(transfer_id, self, error)
                case other:
                    raise BadFrame(f"{other} from a sender")

    async def _post_receives(self) -> None:
        while True:
            while not self._owed:
                self._offered.clear()
                await self._offered.wait()
            pace = self._pace if self._pace is not None and self._pace.is_on else None
            self._tell_paced(pace is not None)
            if pace is not None:  # one frame after the other
                await self._frames.join(self._install_timeout_s)
                await pace.turn()
            slot = await self._slots.acquire(self._peer)
            self._owed -= 1
            if not self._num_posted:
                self._silence.set(self._offer_timeout_s)
            self._num_posted += 1
            received = self.endpoint.recv(Channel.FRAMES, slot.message)
            take = self._take(slot, received)
            self._frames.spawn(take if pace is None else _counted(take, pace))

    async def _take(self, slot: Slot, received: asyncio.Future[None]) -> None:
        try:
            await self._arrived(received)
            header = read_frame(slot.message)
            if self._is_new(header.number):
                await self._handle(header, slot)
            else:
                self._receive_again()
        except FabricError as error:
            self.break_off(error)
        if await settled(received, self._install_timeout_s):
            self._slots.release(slot)

    async def _arrived(self, received: asyncio.Future[None]) -> None:
        try:
            await received
        finally:
            self._num_posted -= 1
            if self._num_posted:  # each has its time from the one before it
                self._silence.set(self._offer_timeout_s)
            else:
                self._silence.stop()

    def _fell_silent(self) -> None:
        told = f"offered frames, and sent none for {self._offer_timeout_s:g} s"
        self.break_off(DeadlineExceeded(told))

    def _is_new(self, number: int) -> bool:
        if number in self._numbers:
            return False
        self._numbers[number] = None
        if len(self._numbers) > NUMBERS_REMEMBERED:
            self._numbers.popitem(last=False)
        return True

    def _receive_again(self) -> None:
        """A message that came twice has taken the receive of one that was offered."""
        self._counters.dropped_frames += 1
        self._owed += 1
        self._offered.set()

    async def _handle(self, header: FrameHeader, slot: Slot) -> None:
        if header.kind is FrameKind.VOID:
            return
        claimed = self._incoming.claim(header, self, self._send_abort)
        if isinstance(claimed, AbortReason):
            self._counters.dropped_frames += 1
            self._send_abort(header.transfer_id, claimed)
            return
        incoming, part = claimed
        slot.owner = incoming.owner
        payload = payload_view(slot.message, header.nbytes)
        try:
            if header.kind is FrameKind.COMMIT:
                await self._commit(incoming, part, header, payload)
            else:
                await self._install(incoming, part, header, payload)
        except FabricError as error:
            self._incoming.lose(incoming, error)

    async def _install(
        self, incoming: Incoming, part: Part, header: FrameHeader, payload: memoryview
    ) -> None:
        raw_nbytes = incoming.transfer.shape.frame_nbytes(header.range)
        if raw_nbytes > self._slots.payload_nbytes:  # to whatever little it was encoded
            raise BadFrame(f"{header.range} of {raw_nbytes} bytes would fit no slot")
        if part.accept(header) is Verdict.DUPLICATE:
            self._counters.dropped_frames += 1
            return
        await self._verify(header, payload)
        if not incoming.alive:
            return
        started = time.monotonic_ns()
        try:
            await incoming.sink.install(header.range, payload, header.codec)
        except (Exception, asyncio.CancelledError) as error:  # theirs: ours is never cancelled
            raise InstallFailed(f"the sink failed on {header.range}: {error!r}") from error
        if incoming.alive:
            incoming.installed(Span(started, time.monotonic_ns()))
            part.installed(header.sequence)
            self._counters.received_frames += 1
            self._counters.received_nbytes += header.nbytes
            self._incoming.touch(incoming)
            self._commit_if_complete(incoming)

    async def _commit(
        self, incoming: Incoming, part: Part, header: FrameHeader, payload: memoryview
    ) -> None:
        await self._verify(header, payload)
        if not incoming.alive or part.commit(header) is Verdict.DUPLICATE:
            return
        if part.heads.start == incoming.transfer.shape.first_head:
            incoming.commit = bytes(payload)
        self._commit_if_complete(incoming)

    def _commit_if_complete(self, incoming: Incoming) -> None:
        if self._incoming.committed_if_complete(incoming) and self._pace is not None:
            self._pace.complete()

    async def _verify(self, header: FrameHeader, payload: memoryview) -> None:
        if header.checksum is None:
            return
        if await self._checksummer.of(payload) != header.checksum:
            raise ChecksumMismatch(f"frame {header.sequence} is not what was sent")

    def _send_abort(self, transfer_id: TransferId, reason: AbortReason) -> None:
        self._say(Abort(transfer_id, reason))

    def _tell_paced(self, is_on: bool) -> None:
        """Before the first frame that it is about: a sender measures the link by its frames."""
        if is_on != self._is_paced:
            self._is_paced = is_on
            self._say(Paced(is_on))

    def _say(self, message: Control) -> None:
        if len(self._unread) >= MAX_UNREAD:
            self.break_off(BadFrame(f"the peer reads nothing that it is told, now {message}"))
            return
        sent = self.endpoint.send(Channel.CONTROL, encode_control(message))
        self._unread.add(sent)
        sent.add_done_callback(self._unread.discard)


async def _counted(take: Coroutine[None, None, None], pace: Pace) -> None:
    charged_s = pace.begin()
    try:
        await take
    finally:
        pace.done(charged_s)
