"""Transfer: the pure judge of what has come. No IO, no clock, no buffers.

Life cycle of a transfer at its receiver:
1. `accept` judges each KV frame by its header, before its payload is looked at.
2. `installed` is told when an accepted frame's payload is checked and in its place.
3. `commit` is told what COMMIT says; it may come before, between or behind the last frames.
4. `complete` holds once COMMIT is here and every frame it counts is installed.
5. When it will not complete, `verified_tokens` says how far the KV can be used.

Accepted frames are disjoint, so "all layers and heads of a token are here" is the same as "the
installed frames with that token add up to layers x heads".
"""

from bisect import bisect_left, bisect_right, insort
from enum import Enum

from kvfabric.errors import BadFrame
from kvfabric.frame import RAW, FrameHeader, FrameKind, FrameRange
from kvfabric.ticket import KVShape


class Verdict(Enum):
    INSTALL = "install"
    DUPLICATE = "duplicate"
    """The same frame again: drop it, nothing is lost."""


class Transfer:
    """What has come of KV [first_token, num_tokens) over all layers and heads."""

    def __init__(self, first_token: int, num_tokens: int, shape: KVShape) -> None:
        self.first_token = first_token
        self.num_tokens = num_tokens
        self.shape = shape
        self.nbytes = 0
        """Payload bytes of the accepted frames."""
        self._accepted: dict[int, FrameRange] = {}
        self._installed: list[FrameRange] = []
        self._by_first_token: list[tuple[int, int]] = []  # (first token, sequence), sorted
        self._widest = 0  # tokens of the widest accepted frame
        self._cells_missing = (num_tokens - first_token) * shape.num_layers * shape.num_heads
        self._num_frames: int | None = None  # as COMMIT says

    @property
    def num_accepted(self) -> int:
        return len(self._accepted)

    @property
    def complete(self) -> bool:
        return self._num_frames is not None and len(self._installed) == self._num_frames

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
        self._installed.append(self._accepted[sequence])

    def commit(self, num_frames: int) -> Verdict:
        """COMMIT is here and counts this many KV frames. Raises `BadFrame`."""
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

    def verified_tokens(self) -> int:
        """KV of [first_token, this) is installed over all layers and heads."""
        cells = self.shape.num_layers * self.shape.num_heads
        steps: dict[int, int] = {}  # token -> change of the number of installed cells there
        for r in self._installed:
            area = r.num_layers * r.num_heads
            steps[r.first_token] = steps.get(r.first_token, 0) + area
            end = r.first_token + r.num_tokens
            steps[end] = steps.get(end, 0) - area
        level, verified = 0, self.first_token
        for token in sorted(steps):
            if level < cells and token > self.first_token:
                break
            verified = token
            level += steps[token]
        return verified

    def _check_bounds(self, header: FrameHeader) -> None:
        r, shape = header.range, self.shape
        inside = (
            r.first_token >= self.first_token
            and r.first_token + r.num_tokens <= self.num_tokens
            and r.first_layer + r.num_layers <= shape.num_layers
            and r.first_head + r.num_heads <= shape.num_heads
            and min(r.num_tokens, r.num_layers, r.num_heads) > 0
        )
        if not inside:
            raise BadFrame(f"{r} is outside the ticket or the KV")
        if header.codec != RAW:
            raise BadFrame(f"codec {header.codec} is not known here")
        if header.nbytes != shape.frame_nbytes(r):
            raise BadFrame(f"{r} has {shape.frame_nbytes(r)} bytes, not {header.nbytes}")

    def _check_disjoint(self, new: FrameRange) -> None:
        low = bisect_right(self._by_first_token, (new.first_token - self._widest, -1))
        high = bisect_left(self._by_first_token, (new.first_token + new.num_tokens, -1))
        for _, sequence in self._by_first_token[low:high]:
            if _overlap(self._accepted[sequence], new):
                raise BadFrame(f"{new} overlaps {self._accepted[sequence]}")

    def _check_covered(self) -> None:
        """All frames of COMMIT are here: then they must be all of the KV."""
        if len(self._accepted) == self._num_frames and self._cells_missing:
            raise BadFrame(f"COMMIT leaves {self._cells_missing} token x layer x head missing")

    def _record(self, header: FrameHeader) -> None:
        r = header.range
        self._accepted[header.sequence] = r
        insort(self._by_first_token, (r.first_token, header.sequence))
        self._widest = max(self._widest, r.num_tokens)
        self._cells_missing -= r.num_tokens * r.num_layers * r.num_heads
        self.nbytes += header.nbytes


def _overlap(a: FrameRange, b: FrameRange) -> bool:
    return (
        a.first_token < b.first_token + b.num_tokens
        and b.first_token < a.first_token + a.num_tokens
        and a.first_layer < b.first_layer + b.num_layers
        and b.first_layer < a.first_layer + a.num_layers
        and a.first_head < b.first_head + b.num_heads
        and b.first_head < a.first_head + a.num_heads
    )
