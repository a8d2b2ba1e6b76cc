"""Logprobs as OpenAI shows them: one shape in chats, another in text completions."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Self

from pydantic import BaseModel

from router.choice import PieceToken
from router.request import TokenLogprobs
from router.token_bytes import token_text

LEAST = -9999.0
"""JSON has no infinity; OpenAI writes this for "hardly ever"."""


@dataclass(frozen=True, slots=True)
class Names:
    """What tokens are called in answers."""

    raw: Callable[[int], bytes]
    """Token id → what it stands for."""
    are_ids: bool = False
    """vLLM's `return_tokens_as_token_ids`: no two tokens have one name."""

    def __call__(self, token_id: int, raw: bytes | None = None) -> str:
        if self.are_ids:
            return f"token_id:{token_id}"
        return token_text(self.raw(token_id) if raw is None else raw)


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
    def of(cls, tokens: Iterable[PieceToken], names: Names) -> Self:
        def top(token_id: int, logprob: float) -> TopLogprob:
            raw = names.raw(token_id)
            return TopLogprob(token=names(token_id, raw), logprob=_finite(logprob), bytes=list(raw))

        return cls(
            content=[
                TokenLogprob(
                    **dict(top(token.token_id, token.logprobs.logprob)),
                    top_logprobs=[top(*entry) for entry in token.logprobs.top],
                )
                for token in tokens
                if token.logprobs is not None
            ]
        )


class PromptLogprob(BaseModel):
    """vLLM's shape."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""Of each prompt token, by token id: its own and the likeliest's. None of the first."""


class TextLogprobs(BaseModel):
    """Lists of equal length. Of the first token of an echoed prompt nothing is known."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]
    """Of the token itself too: one more than was asked for where it is not among the likeliest."""

    @classmethod
    def of(cls, tokens: Sequence[PieceToken], names: Names) -> Self:
        texts = [names(token.token_id) for token in tokens]
        own: list[float | None] = []
        tops: list[dict[str, float] | None] = []
        for token, text in zip(tokens, texts, strict=True):
            told = token.logprobs
            own.append(None if told is None else _finite(told.logprob))
            tops.append(None if told is None else _top(told, text, names))
        return cls(
            text_offset=[token.text_offset for token in tokens],
            token_logprobs=own,
            tokens=texts,
            top_logprobs=tops,
        )


def prompt_logprobs(
    tokens: Iterable[tuple[int, TokenLogprobs | None]] | None, names: Names
) -> PromptLogprobs | None:
    if tokens is None:
        return None

    def entry(token_id: int, logprob: float, rank: int) -> PromptLogprob:
        text = token_text(names.raw(token_id))
        return PromptLogprob(logprob=_finite(logprob), rank=rank, decoded_token=text)

    shown: PromptLogprobs = []
    for token_id, told in tokens:
        if told is None:
            shown.append(None)
            continue
        entries = {str(token_id): entry(token_id, told.logprob, told.rank)}
        for rank, (top_id, logprob) in enumerate(told.top, 1):
            entries.setdefault(str(top_id), entry(top_id, logprob, rank))
        shown.append(entries)
    return shown


def _top(told: TokenLogprobs, text: str, names: Names) -> dict[str, float]:
    top: dict[str, float] = {}
    for token_id, value in told.top:  # two tokens may have one text
        top.setdefault(names(token_id), _finite(value))
    top.setdefault(text, _finite(told.logprob))
    return top


def _finite(logprob: float) -> float:
    return max(logprob, LEAST)
