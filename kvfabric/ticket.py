"""The ticket of a transfer and the two ends that fill and drain it.

`kvfabric` moves opaque bytes: what a payload means is between a `FrameSource` (prefill) and a
`FrameSink` (decode), both given by the services. Neither torch nor gRPC is known here.
"""

import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

from kvfabric.errors import FabricError
from kvfabric.frame import RAW, TRANSFER_ID_NBYTES, FrameRange
from kvfabric.frame import TransferId as TransferId


def new_transfer_id() -> TransferId:
    return TransferId(secrets.token_bytes(TRANSFER_ID_NBYTES))


@dataclass(frozen=True, slots=True)
class KVShard:
    """A process of the receiver, and the KV heads that go there."""

    address: str
    """`ucx://host:port` (or `inproc://name`) of its listener."""
    generation: int
    """Its own; a successor on the same port refuses the handshake."""
    first_head: int
    num_heads: int

    @property
    def heads(self) -> range:
        return range(self.first_head, self.first_head + self.num_heads)


@dataclass(frozen=True, slots=True)
class Ticket:
    """The right to send KV of tokens [first_token, num_tokens) to one worker, once."""

    transfer_id: TransferId
    shards: tuple[KVShard, ...]
    """Where the KV goes. Their heads, in order, are all of the model's."""
    fingerprint: bytes
    """32 bytes: what KV means at the receiver."""
    first_token: int
    num_tokens: int
    block_size: int
    """Frames but the last end on multiples of it."""
    facts: str = ""
    """What the fingerprint is of, for people; see kvfabric/facts.py."""
    codecs: tuple[int, ...] = ()
    """Ids of the codecs that the receiver takes beside RAW."""
    owner: str = ""
    """For whom, as this process's ledger tells. Not on the wire."""


@dataclass(frozen=True, slots=True)
class KVShape:
    """Shape of the KV of one token, as far as framing needs it.

    A payload is laid out `[layers, 2, tokens, heads, head_dim]`; `head_nbytes` is the size of one
    head's K (or V) of one token, so a frame has `layers * 2 * tokens * heads * head_nbytes` bytes.
    """

    num_layers: int
    num_heads: int
    head_nbytes: int
    first_head: int = 0
    """Of the model's: a process may have only some of them. On the wire heads keep the model's
    numbers."""

    @property
    def heads(self) -> range:
        return range(self.first_head, self.first_head + self.num_heads)

    def shared_with(self, heads: range) -> "KVShape":
        """The part of it that is of these heads too; it may have none."""
        first, end = max(self.first_head, heads.start), min(self.heads.stop, heads.stop)
        return replace(self, first_head=first, num_heads=max(end - first, 0))

    def frame_nbytes(self, frame: FrameRange) -> int:
        return frame.num_layers * 2 * frame.num_tokens * frame.num_heads * self.head_nbytes


class Span(NamedTuple):
    """From the first begin to the last end, by time.monotonic_ns."""

    begin_ns: int
    end_ns: int


NOTHING = Span(0, 0)


def around(spans: Iterable[Span]) -> Span:
    """All of those that are something; zeros: none is."""
    there = [span for span in spans if span.begin_ns]
    first = min((span.begin_ns for span in there), default=0)
    return Span(first, max((span.end_ns for span in there), default=0))


@dataclass(frozen=True, slots=True)
class ShipReport:
    """What sending one transfer took."""

    pack_ns: int
    """Summed over the frames; they overlap, so it may exceed `ship_ns`."""
    ship_ns: int
    """First frame handed to the network → last slot free again."""
    nbytes: int
    """Payload bytes of the KV frames."""
    frames: int
    pack: Span
    ship: Span
    transports: tuple[str, ...]
    """That the connection really runs over, such as ("posix", "tcp")."""
    codec: int
    """Id that most of the frames said."""
    offers: int
    """OFFERs sent for its frames."""
    ranks: tuple["ShipReport", ...] = ()
    """Of a sender of several ranks: each one's, in order."""


@dataclass(frozen=True, slots=True)
class ReceiveReport:
    """What receiving one transfer took."""

    install_ns: int
    """Summed over the frames; they overlap, so it may exceed `receive_ns`."""
    receive_ns: int
    """First frame here → last frame installed."""
    nbytes: int
    """Payload bytes of the KV frames."""
    frames: int
    install: Span = NOTHING
    """Zeros: there was nothing to install."""
    ranks: tuple["ReceiveReport", ...] = ()
    """Of a receiver of several ranks: each one's, in order."""


class Packed(NamedTuple):
    """What a source made of a frame."""

    nbytes: int
    """So much of the buffer is the payload."""
    codec: int = RAW


class FrameSource(Protocol):
    """The sender's end of a transfer. Called on the fabric's loop."""

    async def pack(
        self, frame: FrameRange, out: memoryview, link_nbytes_per_s: float | None
    ) -> Packed:
        """Fills `out`, which has the frame's raw size, with the frame's KV: all of it, or less by
        a codec of the ticket. `link_nbytes_per_s`: what the connection was measured to carry, if
        it was. Never cancelled: `out` is the fabric's again when it returns. Several frames may be
        packed concurrently."""


class BlockLender(Protocol):
    """The blocks of a transfer's request, for the worker's other ranks: they have blocks of the
    same ids, and no pool. Called on the fabric's loop; each `enter` that returned is followed by
    one `exit`."""

    async def enter(self) -> Sequence[int]:
        """The ids; the list may grow. They are lent from now on. Raises `TransferAborted` if
        the request is gone."""

    def exit(self) -> None:
        """Nothing is copied into or out of them any more."""


class FrameSink(Protocol):
    """The receiver's end of a transfer. Called on the fabric's loop, exactly one of `committed`
    and `lost` at the end (neither after `Fabric.forget`), and `install` never after either."""

    async def install(self, frame: FrameRange, payload: memoryview, codec: int) -> None:
        """Copies a checked payload out of its slot, and decodes it; when it returns the slot is
        used again. Frames of one transfer may be installed concurrently and in any order. Never
        cancelled; an install under way when `lost` is called runs on, and does not count as
        installed."""

    def committed(self, commit: bytes, report: ReceiveReport) -> None:
        """Every frame is installed and the transfer is over; `commit` is the COMMIT payload."""

    def lost(self, error: FabricError, num_tokens: int) -> None:
        """The transfer will not be completed. KV of [first_token, num_tokens) is installed and
        verified over all layers and heads; the rest must come under another ticket."""
