"""Logprobs as OpenAI shows them: one shape in chats, another in text completions."""

from collections.abc import Callable, Iterable, Sequence
from typing import Self

from pydantic import BaseModel

from router.choice import PieceToken
from router.token_bytes import token_text

LEAST = -9999.0
"""JSON has no infinity; OpenAI writes this for "hardly ever"."""

BytesOf = Callable[[int], bytes]
"""Token id → what it stands for."""


class TopLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    content: list[TokenLogprob]
    refusal: None = None

    @classmethod
    def of(cls, tokens: Iterable[PieceToken], bytes_of: BytesOf) -> Self:
        def top(token_id: int, logprob: float) -> TopLogprob:
            raw = bytes_of(token_id)
            return TopLogprob(token=token_text(raw), logprob=_finite(logprob), bytes=list(raw))

        return cls(
            content=[
                TokenLogprob(
                    **dict(top(token.token_id, token.logprobs.logprob)),
                    top_logprobs=[top(*entry) for entry in token.logprobs.top],
                )
                for token in tokens
            ]
        )


class TextLogprobs(BaseModel):
    """Lists of equal length."""

    text_offset: list[int]
    token_logprobs: list[float]
    tokens: list[str]
    top_logprobs: list[dict[str, float]]
    """Of the token itself too: one more than was asked for where it is not among the likeliest."""

    @classmethod
    def of(cls, tokens: Sequence[PieceToken], bytes_of: BytesOf) -> Self:
        texts = [token_text(bytes_of(token.token_id)) for token in tokens]
        own = [_finite(token.logprobs.logprob) for token in tokens]
        tops = []
        for token, text, logprob in zip(tokens, texts, own, strict=True):
            top: dict[str, float] = {}
            for token_id, value in token.logprobs.top:  # two tokens may have one text
                top.setdefault(token_text(bytes_of(token_id)), _finite(value))
            top.setdefault(text, logprob)
            tops.append(top)
        return cls(
            text_offset=[token.text_offset for token in tokens],
            token_logprobs=own,
            tokens=texts,
            top_logprobs=tops,
        )


def _finite(logprob: float) -> float:
    return max(logprob, LEAST)
