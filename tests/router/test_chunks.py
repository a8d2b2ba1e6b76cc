"""Events that are written around a text are those that the whole chunk would give."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.chat_format import ChatFormat
from router.choice import Piece, PieceToken
from router.chunks import Chunks
from router.request import FinishReason, RequestId, TokenLogprobs
from router.responses import Format, TextFormat
from router.sse import event

NAMES = ("tiny", '{"text":"\\u0000text\\u0000"}', "\0text\0")
FORMATS: list[Format] = [
    form
    for name in NAMES
    for form in (
        ChatFormat(RequestId("r"), name, lambda token_id: b"x", None),
        TextFormat(RequestId("r"), name, lambda token_id: b"x"),
    )
]
TOKEN = PieceToken(7, 0, TokenLogprobs(-0.5, 1, ()))


def in_full(form: Format, pieces: Sequence[Piece], *, has_usage: bool) -> bytes:
    told, events = set(), []
    for piece in pieces:
        opening = [] if piece.index in told else form.opening(piece.index)
        told.add(piece.index)
        events += [form.chunk([c], has_usage=has_usage) for c in [*opening, *form.delta(piece)]]
    return b"".join(map(event, events))


def piece(
    index: int, text: str, reason: FinishReason | None, tokens: tuple[PieceToken, ...] = ()
) -> Piece:
    return Piece(index, text, tokens, 1, 0, 0.0, reason)


TEXTS = st.text(st.characters(codec="utf-8") | st.sampled_from('\x85\u2028"\\\n\0'))
PIECES = st.lists(
    st.builds(
        piece,
        st.integers(0, 11),
        TEXTS.filter(bool),
        st.sampled_from([None, None, None, FinishReason.STOP]),
        st.sampled_from([(), (), (TOKEN,)]),
    )
)


@pytest.mark.parametrize("form", FORMATS)
@given(PIECES, st.booleans())
def test_any_pieces(form: Format, pieces: list[Piece], has_usage: bool) -> None:
    chunks = Chunks(form, has_usage=has_usage)
    told = b"".join(chunks.of([one]) for one in pieces)
    assert told == in_full(form, pieces, has_usage=has_usage)
    assert Chunks(form, has_usage=has_usage).of(pieces) == told


def test_a_choice_may_end_without_text() -> None:
    for form in FORMATS:
        pieces = [piece(0, "a", None), piece(0, "", FinishReason.LENGTH)]
        assert Chunks(form, has_usage=False).of(pieces) == in_full(form, pieces, has_usage=False)
