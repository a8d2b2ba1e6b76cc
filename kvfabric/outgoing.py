"""Outgoing: what one process sends of a transfer to one process.

1. `extend` says how far the KV is computed; frames of whole receiver blocks become ready, and at
   the end frames of some layers.
2. The link to the peer takes frames in turn with those of other transfers: `pop`, `fill`, `posted`.
3. `commit` lets COMMIT follow the last frame. `done` resolves when the last slot is free again.
4. `cancel`, or the first failure, drops what has not been packed; frames under way run to their
   end, then `done` fails.

`extend`, `commit` and `cancel` are for other threads and only enqueue; the rest is the loop's.
"""

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import replace

from kvfabric.checksum import Checksummer
from kvfabric.errors import FabricError, PackFailed, TransferAborted
from kvfabric.frame import (
    RAW,
    FrameHeader,
    FrameKind,
    FrameRange,
    payload_view,
    write_frame,
)
from kvfabric.frame_plan import plan_frames
from kvfabric.shipment import Shipment
from kvfabric.slots import Slot
from kvfabric.ticket import FrameSource, KVShape, KVShard, ShipReport, Span, Ticket

LAST_PIECES = 4
"""Nothing hides the last group of layers: its frames are this part of a slot at most, so that
packing, the network and installing overlap at least for each other."""


class Outgoing(Shipment):
    """To `peer`, one of the ticket's shards, go the heads of `shape` that are also its own."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        ticket: Ticket,
        peer: KVShard,
        shape: KVShape,
        source: FrameSource,
        *,
        max_nbytes: int,
        checksummer: Checksummer | None,
    ) -> None:
        self.ticket = ticket
        self.peer = peer
        super().__init__()
        self.error: FabricError | None = None
        self.tell_peer = False
        """The transfer failed on this side, and the receiver has not been told yet."""
        self.on_change: Callable[[], None] = lambda: None
        """Set by the link: something became ready, or the transfer is over."""
        self.transports: tuple[str, ...] = ()
        """Set by the link: what its messages travel over."""
        self.offers = 0
        """OFFERs that the link sent for its frames."""
        self._loop = loop
        self._shape = shape.shared_with(peer.heads)
        self._source = source
        self._max_nbytes = max_nbytes
        self._checksummer = checksummer
        self._planned_tokens = ticket.first_token  # all layers of those below
        self._planned_layers = 0  # of all tokens behind them
        self._ready: deque[FrameRange] = deque()
        self._commit: bytes | None = None
        self._commit_popped = False
        self._unposted = 0  # frames popped and not yet handed to the network
        self.num_in_flight = 0  # slots that hold frames of this transfer
        self._frames = 0
        self._nbytes = 0
        self._codecs: Counter[int] = Counter()  # of the frames
        self._pack_ns = self._pack_begin_ns = self._pack_end_ns = 0
        self._first_post_ns = 0

    # From any thread.

    def extend(self, num_tokens: int, num_layers: int | None = None) -> None:
        self._call(self._extend, num_tokens, num_layers)

    def commit(self, payload: bytes) -> None:
        assert len(payload) <= self._max_nbytes
        self._call(self._set_commit, payload)

    def cancel(self) -> None:
        self._call(self.fail, TransferAborted("cancelled here"))

    def _call(self, function: Callable[..., None], *args: object) -> None:
        try:
            self._loop.call_soon_threadsafe(function, *args)
        except RuntimeError:
            assert self._loop.is_closed()  # the fabric closed first, and has failed `done`

    # On the loop.

    @property
    def num_ready(self) -> int:
        """Frames that could be popped now."""
        return len(self._ready) + self._commit_ready

    @property
    def next_nbytes(self) -> int | None:
        """Of the next frame to be popped, raw; 0 for COMMIT; None: there is none now."""
        if self._ready:
            return self._shape.frame_nbytes(self._ready[0])
        return 0 if self._commit_ready else None

    @property
    def num_offerable(self) -> int:
        """Frames that will be popped without anything more from outside."""
        commit_to_come = self._commit is not None and not self._commit_popped and not self.error
        return len(self._ready) + commit_to_come

    @property
    def finished(self) -> bool:
        return self.done.done()

    def pop(self) -> FrameRange | None:
        """The next frame to fill; None is COMMIT. Only while `num_ready`."""
        assert self.num_ready
        frame = self._ready.popleft() if self._ready else None
        self._commit_popped = frame is None
        self.num_in_flight += 1
        self._unposted += 1
        return frame

    async def fill(
        self,
        frame: FrameRange | None,
        slot: Slot,
        number: int,
        link_nbytes_per_s: float | None = None,
    ) -> memoryview:
        """Packs the frame into its slot; returns the message, which has this number on its
        connection. Raises `FabricError`, also when the transfer has failed meanwhile."""
        if frame is None:
            header = await self._fill_commit(slot)
        else:
            header = await self._fill_kv(frame, slot, link_nbytes_per_s)
        if self.error is not None:
            raise self.error
        return write_frame(replace(header, number=number), slot.message)

    def posted(self) -> None:
        """The message of a popped frame is handed to the network."""
        self._unposted -= 1
        self._first_post_ns = self._first_post_ns or time.monotonic_ns()

    def not_posted(self) -> None:
        """A popped frame will not be sent."""
        self._unposted -= 1

    def slot_freed(self) -> None:
        """The slot of a popped frame is free again."""
        self.num_in_flight -= 1
        self._finish_if_over()

    def fail(self, error: FabricError, *, tell_peer: bool = True) -> None:
        """The first failure counts."""
        if self.error is not None or self.finished:
            return
        self.error = error
        self.tell_peer = tell_peer
        self._ready.clear()
        self._finish_if_over()

    async def _fill_kv(
        self, frame: FrameRange, slot: Slot, link_nbytes_per_s: float | None
    ) -> FrameHeader:
        sequence, self._frames = self._frames, self._frames + 1
        nbytes = self._shape.frame_nbytes(frame)
        payload = payload_view(slot.message, nbytes)
        started = time.monotonic_ns()
        self._pack_begin_ns = self._pack_begin_ns or started
        try:
            packed = await self._source.pack(frame, payload, link_nbytes_per_s)
            assert packed.codec in (RAW, *self.ticket.codecs), packed
            assert packed == (nbytes, RAW) or 0 < packed.nbytes < nbytes, packed
        except (Exception, asyncio.CancelledError) as error:  # theirs: ours is never cancelled
            raise PackFailed(f"the source failed on {frame}: {error!r}") from error
        self._pack_end_ns = time.monotonic_ns()
        self._pack_ns += self._pack_end_ns - started
        self._codecs[packed.codec] += 1
        self._nbytes += packed.nbytes
        return FrameHeader(
            FrameKind.KV, self.ticket.transfer_id, sequence, frame, packed.nbytes,
            await self._checksum(payload[: packed.nbytes]), packed.codec,
        )  # fmt: skip

    async def _fill_commit(self, slot: Slot) -> FrameHeader:
        assert self._commit is not None
        payload = payload_view(slot.message, len(self._commit))
        payload[:] = self._commit
        heads = FrameRange(0, 0, 0, 0, self._shape.first_head, self._shape.num_heads)
        return FrameHeader(
            FrameKind.COMMIT, self.ticket.transfer_id, self._frames, heads, len(payload),
            await self._checksum(payload),
        )  # fmt: skip

    async def _checksum(self, payload: memoryview) -> int | None:
        return None if self._checksummer is None else await self._checksummer.of(payload)

    @property
    def _commit_ready(self) -> bool:
        """COMMIT is posted behind the last KV frame."""
        return (
            self._commit is not None
            and not self._commit_popped
            and not self._ready
            and not self._unposted
            and self.error is None
        )

    def _extend(self, num_tokens: int, num_layers: int | None) -> None:
        if self.error is not None or self.finished:
            return
        ticket, end_layer = self.ticket, num_layers or self._shape.num_layers
        assert num_tokens <= ticket.num_tokens
        if num_tokens < ticket.num_tokens:  # all but the tail leave as whole receiver blocks
            assert end_layer == self._shape.num_layers, "layers are told of with all tokens"
            assert not self._planned_layers, "all tokens were told of before"
            num_tokens -= num_tokens % ticket.block_size
        if num_tokens <= self._planned_tokens or end_layer <= self._planned_layers:
            return
        layers = range(self._planned_layers, end_layer)
        self._ready.extend(
            plan_frames(
                self._planned_tokens,
                num_tokens,
                shape=self._shape,
                block_size=ticket.block_size,
                max_nbytes=self._most_nbytes(layers),
                layers=layers,
            )
        )
        if end_layer == self._shape.num_layers:
            self._planned_tokens, self._planned_layers = num_tokens, 0
        else:
            self._planned_layers = end_layer
        self.on_change()

    def _most_nbytes(self, layers: range) -> int:
        """Of a frame of these."""
        if layers.start == 0 or layers.stop < self._shape.num_layers:
            return self._max_nbytes
        smallest = self._shape.frame_nbytes(FrameRange(0, 1, 0, 1, 0, self._shape.num_heads))
        return max(self._max_nbytes // LAST_PIECES, smallest)

    def _set_commit(self, payload: bytes) -> None:
        if self._planned_tokens != self.ticket.num_tokens:
            self.fail(PackFailed(f"committed after {self._planned_tokens} tokens"))
            return
        self._commit = payload
        self.on_change()

    def _finish_if_over(self) -> None:
        """Ends `done` once no slot holds a frame any more and nothing is to come."""
        if self.num_in_flight or self.finished:
            return
        if self.error is not None:
            self.done.set_exception(self.error)
        elif self._commit_popped:
            self.done.set_result(self._report(Span(self._first_post_ns, time.monotonic_ns())))
        self.on_change()

    def _report(self, ship: Span) -> ShipReport:
        return ShipReport(
            pack_ns=self._pack_ns,
            ship_ns=ship.end_ns - ship.begin_ns,
            nbytes=self._nbytes,
            frames=self._frames,
            pack=Span(self._pack_begin_ns, self._pack_end_ns),
            ship=ship,
            transports=self.transports,
            codec=max(self._codecs, key=self._codecs.__getitem__, default=RAW),
            offers=self.offers,
        )
