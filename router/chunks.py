"""The chunks of one streamed answer, as server-sent events.

Most pieces are text and nothing else. Their chunks differ in that text alone, so what stands around
it is written once for each choice: by far the cheapest way to one event a token.
"""

from collections.abc import Sequence

from pydantic_core import to_json

from router.chat_objects import ChatChunkChoice
from router.choice import Piece
from router.responses import Format, TextChoice, Usage
from router.sse import event, one_line

_MARK = "\0text\0"


class Chunks:
    """See the module."""

    def __init__(self, form: Format, *, has_usage: bool) -> None:
        self._form = form
        self._has_usage = has_usage
        self._around: dict[int, tuple[bytes, bytes] | None] = {}
        """What stands before and behind the text, of each choice that has begun; None where a text
        does not go out as it is."""

    def of(self, pieces: Sequence[Piece], so_far: Usage | None = None) -> bytes:
        """Their events; before a choice's first piece, what opens it. `so_far`: the usage that each
        of them tells."""
        return b"".join([part for piece in pieces for part in self._of(piece, so_far)])

    def usage(self, usage: Usage) -> bytes:
        return event(self._form.chunk([], usage, has_usage=True))

    def _of(self, piece: Piece, so_far: Usage | None) -> Sequence[bytes]:
        if piece.index not in self._around:
            self._around[piece.index] = self._around_text(piece.index)
            opening = [self._chunk(one, so_far) for one in self._form.opening(piece.index)]
            return [*opening, *self._of(piece, so_far)]
        around = self._around[piece.index]
        is_text_alone = piece.finish_reason is None and not piece.tokens
        if around is None or not is_text_alone or so_far is not None:
            return [self._chunk(choice, so_far) for choice in self._form.delta(piece)]
        text = to_json(piece.text)
        return around[0], text if text.isascii() else one_line(text.decode()).encode(), around[1]

    def _chunk(self, choice: ChatChunkChoice | TextChoice, so_far: Usage | None = None) -> bytes:
        return event(self._form.chunk([choice], so_far, has_usage=self._has_usage))

    def _around_text(self, index: int) -> tuple[bytes, bytes] | None:
        if not self._form.is_plain:
            return None
        marked = Piece(index, _MARK, (), 0, 0, 0.0, None)
        (choice,) = self._form.delta(marked)
        # The last one: what clients and flags say may have such a text too, and stands before it.
        before, _, behind = self._chunk(choice).rpartition(to_json(_MARK))
        return before, behind
