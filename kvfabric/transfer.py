"""Transfer: the pure judge of what has come. No IO, no clock, no buffers.

Life cycle of a transfer at its receiver:
1. `part` binds each connection to the heads that its frames name; nobody else may send those. It
   judges by the header, before the payload is looked at.
2. `Part.accept` judges each KV frame, `Part.installed` is told when its payload is checked and in
   its place, `Part.commit` is told what COMMIT says; COMMIT may come before, between or behind the
   last frames.
3. `complete` holds once the parts that are committed and installed add up to all heads.
4. When it will not complete, `verified_tokens` says how far the KV can be used.

Accepted frames are disjoint, so "all layers and heads of a token are here" is the same as "the
installed frames with that token add up to layers x heads".
"""

from collections.abc import Hashable, Sequence
from itertools import chain

from kvfabric.errors import BadFrame
from kvfabric.ticket import KVShape
from kvfabric.transfer_part import Part


class Transfer:
    """What has come of KV [first_token, num_tokens) over all layers and the receiver's heads."""

    def __init__(
        self, first_token: int, num_tokens: int, shape: KVShape, codecs: Sequence[int] = ()
    ) -> None:
        """`codecs`: ids that frames may have beside RAW."""
        self.first_token = first_token
        self.num_tokens = num_tokens
        self.shape = shape
        self._codecs = codecs
        self._parts: dict[Hashable, Part] = {}

    @property
    def nbytes(self) -> int:
        """Payload bytes of the accepted frames."""
        return sum(part.nbytes for part in self._parts.values())

    @property
    def num_accepted(self) -> int:
        return sum(part.num_accepted for part in self._parts.values())

    @property
    def complete(self) -> bool:
        heads = sum(len(part.heads) for part in self._parts.values() if part.complete)
        return heads == self.shape.num_heads

    @property
    def has_free_heads(self) -> bool:
        """Heads that no connection has named yet."""
        return sum(len(part.heads) for part in self._parts.values()) < self.shape.num_heads

    def part(self, sender: Hashable, heads: range) -> Part | None:
        """The part of this connection, whose next frame is of `heads`. It begins with its first
        frame and may grow until its COMMIT. None: another connection has some of them. Raises
        `BadFrame` for what must cost the transfer."""
        part = self._parts.get(sender)
        if part is None:
            return self._begin(sender, heads)
        if part.heads.start <= heads.start and heads.stop <= part.heads.stop:
            return part
        grown = range(min(part.heads.start, heads.start), max(part.heads.stop, heads.stop))
        if part.committed or not self._is_free(grown, part):
            raise BadFrame(f"{heads} are not heads of the connection that sent {part.heads}")
        part.heads = grown
        return part

    def has_all_of(self, sender: Hashable) -> bool:
        """Nothing more is to come from this connection."""
        return sender in self._parts and self._parts[sender].complete

    def verified_tokens(self) -> int:
        """KV of [first_token, this) is installed over all layers and heads."""
        cells = self.shape.num_layers * self.shape.num_heads
        steps: dict[int, int] = {}  # token -> change of the number of installed cells there
        for r in chain.from_iterable(part.installed_frames for part in self._parts.values()):
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

    def _begin(self, sender: Hashable, heads: range) -> Part | None:
        """A stranger disturbs nobody; but whoever comes first must make sense."""
        if not heads or not self._is_free(heads):
            if self._parts:
                return None
            raise BadFrame(f"{heads} are not heads of {self.shape.heads}")
        part = Part(self.first_token, self.num_tokens, self.shape, heads, self._codecs)
        self._parts[sender] = part
        return part

    def _is_free(self, heads: range, own: Part | None = None) -> bool:
        """Whether all of them are the receiver's, and none another connection's."""
        if heads.start < self.shape.heads.start or self.shape.heads.stop < heads.stop:
            return False
        return all(
            part is own or part.heads.stop <= heads.start or heads.stop <= part.heads.start
            for part in self._parts.values()
        )
