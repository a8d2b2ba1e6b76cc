"""Part: the pure judge of what one connection sends of a transfer. No IO, no clock, no buffers.

A sender of several processes sends a transfer in several parts, each over its own connection, with
its own heads, its own sequence numbers and its own COMMIT; a sender of one process sends one part.
`Transfer` says which heads are whose, so frames of different parts never overlap.
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence
from enum import Enum

from kvfabric.errors import BadFrame
from kvfabric.frame import RAW, FrameHeader, FrameKind, FrameRange
from kvfabric.ticket import KVShape


class Verdict(Enum):
    INSTALL = "install"
    DUPLICATE = "duplicate"
    """The same frame again: drop it, nothing is lost."""


class Part:
    """What has come, from one connection, of KV [first_token, num_tokens)."""

    def __init__(
        self,
        first_token: int,
        num_tokens: int,
        shape: KVShape,
        heads: range,
        codecs: Sequence[int] = (),
    ) -> None:
        self.heads = heads
        """Heads that its frames have named; all of them once COMMIT is here."""
        self.nbytes = 0
        """Payload bytes of the accepted frames."""
        self.installed_frames: list[FrameRange] = []
        self._first_token = first_token
        self._num_tokens = num_tokens
        self._shape = shape
        self._codecs = codecs
        self._accepted: dict[int, FrameRange] = {}
        self._by_first_token: list[tuple[int, int]] = []  # (first token, sequence), sorted
        self._widest = 0  # tokens of the widest accepted frame
        self._num_cells = 0  # token x layer x head of the accepted frames
        self._num_frames: int | None = None  # as COMMIT says

    @property
    def num_accepted(self) -> int:
        return len(self._accepted)

    @property
    def committed(self) -> bool:
        return self._num_frames is not None

    @property
    def complete(self) -> bool:
        return self._num_frames is not None and len(self.installed_frames) == self._num_frames

    def accept(self, header: FrameHeader) -> Verdict:
        """Judges a KV frame. Raises `BadFrame` if it must cost the transfer."""
        assert header.kind is FrameKind.KV
        known = self._accepted.get(header.sequence)
        if known is not None:
            if known == header.range:
                return Verdict.DUPLICATE
            raise BadFrame(f"frame {header.sequence} was {known}, now is {header.range}")
        if self._num_frames is not None and len(self._accepted) >= self._num_frames:
            raise BadFrame(f"frame {header.sequence} after all {self._num_frames} of COMMIT")
        self._check_bounds(header)
        self._check_disjoint(header.range)
        self._record(header)
        self._check_covered()
        return Verdict.INSTALL

    def installed(self, sequence: int) -> None:
        """An accepted frame's payload is checked and in its place."""
        self.installed_frames.append(self._accepted[sequence])

    def commit(self, header: FrameHeader) -> Verdict:
        """COMMIT is here; it counts this part's KV frames and names its heads. Raises
        `BadFrame`."""
        assert header.kind is FrameKind.COMMIT
        num_frames, heads = header.sequence, header.range.heads
        if heads != self.heads:
            raise BadFrame(f"COMMIT of {_named(heads)}; frames are of {_named(self.heads)}")
        if self._num_frames == num_frames:
            return Verdict.DUPLICATE
        if self._num_frames is not None or num_frames < len(self._accepted):
            raise BadFrame(
                f"COMMIT of {num_frames} frames; {len(self._accepted)} came, "
                f"an earlier COMMIT says {self._num_frames}"
            )
        self._num_frames = num_frames
        self._check_covered()
        return Verdict.INSTALL

    def _check_bounds(self, header: FrameHeader) -> None:
        r, shape = header.range, self._shape
        inside = (
            r.first_token >= self._first_token
            and r.first_token + r.num_tokens <= self._num_tokens
            and r.first_layer + r.num_layers <= shape.num_layers
            and self.heads.start <= r.first_head
            and r.first_head + r.num_heads <= self.heads.stop
            and min(r.num_tokens, r.num_layers, r.num_heads) > 0
        )
        if not inside:
            raise BadFrame(f"{r} is outside the ticket or the KV")
        if header.codec not in (RAW, *self._codecs):
            raise BadFrame(f"codec {header.codec} is not in the ticket")
        raw_nbytes = shape.frame_nbytes(r)
        is_smaller = header.codec != RAW and 0 < header.nbytes < raw_nbytes
        if header.nbytes != raw_nbytes and not is_smaller:
            raise BadFrame(f"{r} has {raw_nbytes} bytes, not {header.nbytes}")

    def _check_disjoint(self, new: FrameRange) -> None:
        low = bisect_right(self._by_first_token, (new.first_token - self._widest, -1))
        high = bisect_left(self._by_first_token, (new.first_token + new.num_tokens, -1))
        for _, sequence in self._by_first_token[low:high]:
            if _overlap(self._accepted[sequence], new):
                raise BadFrame(f"{new} overlaps {self._accepted[sequence]}")

    def _check_covered(self) -> None:
        """All frames of COMMIT are here: then they must be all of this part's KV."""
        if len(self._accepted) != self._num_frames:
            return
        num_tokens = self._num_tokens - self._first_token
        missing = num_tokens * self._shape.num_layers * len(self.heads) - self._num_cells
        if missing:
            raise BadFrame(f"COMMIT leaves {missing} token x layer x head missing")

    def _record(self, header: FrameHeader) -> None:
        r = header.range
        self._accepted[header.sequence] = r
        insort(self._by_first_token, (r.first_token, header.sequence))
        self._widest = max(self._widest, r.num_tokens)
        self._num_cells += r.num_tokens * r.num_layers * r.num_heads
        self.nbytes += header.nbytes


def _named(heads: range) -> str:
    return f"heads [{heads.start}, {heads.stop})"


def _overlap(a: FrameRange, b: FrameRange) -> bool:
    return (
        a.first_token < b.first_token + b.num_tokens
        and b.first_token < a.first_token + a.num_tokens
        and a.first_layer < b.first_layer + b.num_layers
        and b.first_layer < a.first_layer + a.num_layers
        and a.first_head < b.first_head + b.num_heads
        and b.first_head < a.first_head + a.num_heads
    )
