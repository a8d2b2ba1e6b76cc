"""Events that are written around a text are those that the whole chunk would give."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.chat_format import ChatFormat
from router.choice import Piece, PieceToken
from router.chunks import Chunks
from router.parsers.hermes import HermesParser
from router.parsers.output import OutputParser
from router.request import (
    FinishReason,
    OutputForm,
    RequestId,
    SamplingParams,
    TokenLogprobs,
    ValidPrompt,
    ValidRequest,
)
from router.responses import Format, PromptTokensDetails, TextFormat, Usage
from router.sse import event

NAMES = ("tiny", '{"text":"\\u0000text\\u0000"}', "\0text\0")
SAMPLING = SamplingParams(9, 1.0, 0, 1.0, 1, (), False)
REQUEST = ValidRequest(
    RequestId("r"),
    tuple(ValidPrompt(RequestId(f"r-{index}"), (5,), SAMPLING) for index in range(12)),
    stop=(),
    is_streaming=True,
    has_usage_chunk=False,
    has_logprobs=True,
)
FORMATS: list[Format] = [
    form(REQUEST, name, lambda token_id: b"x")
    for form in (ChatFormat, TextFormat)
    for name in NAMES
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


def test_what_is_more_than_text_is_written_in_full() -> None:
    """A parser must see each text once, and usage changes."""
    output = OutputForm(lambda: OutputParser(None, HermesParser()), 24)
    pieces = [piece(0, "a", None), piece(0, " <b", None), piece(0, "", FinishReason.STOP)]
    usage = Usage(
        prompt_tokens=1,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=0),
        completion_tokens=2,
        total_tokens=3,
    )
    for request in (replace(REQUEST, output=output), replace(REQUEST, has_token_ids=True)):

        def form(request: ValidRequest = request) -> Format:
            return ChatFormat(request, "tiny", lambda token_id: b"x")

        expected = in_full(form(), pieces, has_usage=False)
        assert b"text" not in expected
        assert Chunks(form(), has_usage=False).of(pieces) == expected
    told = Chunks(ChatFormat(REQUEST, "tiny", lambda token_id: b"x"), has_usage=True)
    assert told.of(pieces, usage).count(b'"completion_tokens":2') == 4
