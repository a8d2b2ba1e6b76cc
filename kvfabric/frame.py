"""Frames: the self-describing unit that crosses the network.

One frame is one tag message in one slot:

    | header, 64 bytes | payload, nbytes | trailer, 8 bytes |

The trailer is the digest of the header and stands right behind the payload. Transports accept a
message that is shorter than the buffer without a word, so the trailer is what proves that all of
it came, even with the payload's checksum switched off; it also covers the header itself.

All integers are little endian. Nothing here knows transfers or transports.
"""

import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import NewType

import xxhash

from kvfabric.errors import BadFrame

TransferId = NewType("TransferId", bytes)
"""16 random bytes: the name of a transfer and the capability to send it."""

TRANSFER_ID_NBYTES = 16
WIRE_VERSION = 5

RAW = 0
"""Codec id of a payload as it lies in memory; what the others mean is for the two ends to know."""
MAGIC = b"BTNF"

# magic, version, kind, codec, transfer id, sequence, tokens, layers, heads, flags, number, nbytes,
# checksum
_HEADER = struct.Struct("<4sHBB16sIIIHHHHB3xIIQ")
_TRAILER = struct.Struct("<Q")
HEADER_NBYTES = _HEADER.size
TRAILER_NBYTES = _TRAILER.size
assert HEADER_NBYTES == 64, "payloads start on a cache line"

_HAS_CHECKSUM = 1


class FrameKind(IntEnum):
    KV = 1
    """A range of a request's KV; `sequence` is the index of the frame in its transfer."""

    COMMIT = 2
    """The end of what one connection sends of a transfer; `sequence` is its number of KV frames,
    the range names its heads and nothing else."""

    VOID = 3
    """Takes the place of a frame that was offered and then given up; carries nothing."""


@dataclass(frozen=True, slots=True)
class FrameRange:
    """Which part of a request's KV a frame carries: half-open ranges by first and count."""

    first_token: int
    num_tokens: int
    first_layer: int
    num_layers: int
    first_head: int
    num_heads: int

    @property
    def heads(self) -> range:
        return range(self.first_head, self.first_head + self.num_heads)


NO_RANGE = FrameRange(0, 0, 0, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class FrameHeader:
    """What a frame says about itself."""

    kind: FrameKind
    transfer_id: TransferId
    sequence: int
    range: FrameRange
    nbytes: int
    """Of the payload."""
    checksum: int | None
    """xxh3_64 of the payload; None when the sender computes none."""
    codec: int = RAW
    """How the payload is encoded; 0 is raw. The fabric carries it and never looks."""
    number: int = 0
    """Of the message on its connection, modulo 2**32: tells a repeated message from an offered one,
    whatever has become of its transfer."""


def message_nbytes(payload_nbytes: int) -> int:
    """Size of the message that carries a payload of this size."""
    return HEADER_NBYTES + payload_nbytes + TRAILER_NBYTES


def payload_view(message: memoryview, payload_nbytes: int) -> memoryview:
    """The payload's place in a message; `message` may be longer than the message is."""
    return message[HEADER_NBYTES : HEADER_NBYTES + payload_nbytes]


def payload_checksum(payload: memoryview) -> int:
    return xxhash.xxh3_64_intdigest(payload)


def write_frame(header: FrameHeader, message: memoryview) -> memoryview:
    """Writes header and trailer around the payload in `message`; returns the part to send."""
    r = header.range
    flags = 0 if header.checksum is None else _HAS_CHECKSUM
    _HEADER.pack_into(
        message, 0, MAGIC, WIRE_VERSION, header.kind, header.codec, header.transfer_id,
        header.sequence, r.first_token, r.num_tokens, r.first_layer, r.num_layers, r.first_head,
        r.num_heads, flags, header.number, header.nbytes, header.checksum or 0,
    )  # fmt: skip
    digest = xxhash.xxh3_64_intdigest(message[:HEADER_NBYTES])
    _TRAILER.pack_into(message, HEADER_NBYTES + header.nbytes, digest)
    return message[: message_nbytes(header.nbytes)]


def read_frame(message: memoryview) -> FrameHeader:
    """Parses a received message (its buffer may be longer). Raises `BadFrame`."""
    if len(message) < message_nbytes(0):
        raise BadFrame(f"a frame of {len(message)} bytes has no room for its header")
    magic, version, kind, codec, transfer_id, sequence, *rest = _HEADER.unpack_from(message)
    *bounds, flags, number, nbytes, checksum = rest
    if magic != MAGIC or version != WIRE_VERSION:
        raise BadFrame(f"magic {magic!r} and version {version} are not ours")
    if message_nbytes(nbytes) > len(message):
        raise BadFrame(f"a payload of {nbytes} bytes does not fit a message of {len(message)}")
    digest = xxhash.xxh3_64_intdigest(message[:HEADER_NBYTES])
    if _TRAILER.unpack_from(message, HEADER_NBYTES + nbytes) != (digest,):
        raise BadFrame("the frame was cut short, or its header is corrupt")
    if kind not in FrameKind.__members__.values():
        raise BadFrame(f"unknown kind {kind} of frame")
    return FrameHeader(
        kind=FrameKind(kind),
        transfer_id=TransferId(transfer_id),
        sequence=sequence,
        range=FrameRange(*bounds),
        nbytes=nbytes,
        checksum=checksum if flags & _HAS_CHECKSUM else None,
        codec=codec,
        number=number,
    )
