"""OpenAI's response objects, whole and in chunks: what all have, and text completions.

Chats (router/chat_format.py) and text completions differ in their shape only, a `Format` each. What
is sent when is router/answer.py's.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel, Field

from router.chat_objects import ChatChoice, ChatChunkChoice, is_none
from router.choice import Piece, PieceToken
from router.logprobs import Names, PromptLogprobs, TextLogprobs, prompt_logprobs
from router.request import FinishReason, TokenLogprobs, ValidPrompt, ValidRequest

Object = Literal["chat.completion", "chat.completion.chunk", "text_completion"]


@dataclass(frozen=True, slots=True)
class WholeChoice:
    index: int
    text: str
    tokens: tuple[PieceToken, ...] | None
    """With logprobs; None: they were not asked for."""
    finish_reason: FinishReason
    prompt_tokens: tuple[tuple[int, TokenLogprobs | None], ...] | None = None
    """(token id, its logprobs) of the prompt, if asked for."""
    token_ids: tuple[int, ...] = ()
    """Output tokens, if they are part of the answer."""


class TextChoice(BaseModel):
    """Of a whole completion, and of a chunk."""

    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: Literal["stop", "length"] | None
    prompt_logprobs: PromptLogprobs | None = Field(default=None, exclude_if=is_none)
    """Beyond OpenAI's, where vLLM has it; so are the next two."""
    token_ids: Sequence[int] | None = Field(default=None, exclude_if=is_none)
    """As many as there are; of a chunk, more."""
    prompt_token_ids: Sequence[int] | None = Field(default=None, exclude_if=is_none)


class PromptTokensDetails(BaseModel):
    cached_tokens: int


class Usage(BaseModel):
    prompt_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens: int
    total_tokens: int


class Completion(BaseModel):
    """An answer, or a chunk of one. Chunks have `usage` only if the client asked for it; then it
    is null in all but the last, unless the client asked for it in each."""

    id: str
    object: Object
    created: int
    model: str
    choices: Sequence[ChatChoice | ChatChunkChoice | TextChoice]
    usage: Usage | None = None
    prompt_logprobs: PromptLogprobs | None = Field(default=None, exclude_if=is_none)
    """Beyond OpenAI's: of a chat, where vLLM has it; so is the next."""
    prompt_token_ids: Sequence[int] | None = Field(default=None, exclude_if=is_none)


class Format(ABC):
    """The shape of one request's answer."""

    prefix: str
    whole_object: Object
    chunk_object: Object

    def __init__(self, request: ValidRequest, model: str, bytes_of: Callable[[int], bytes]) -> None:
        self._id = f"{self.prefix}-{request.request_id}"
        self._model = model
        self._request = request
        self._names = Names(bytes_of, request.names_are_ids)
        self._created = int(time.time())

    @property
    def is_plain(self) -> bool:
        """A piece's text goes out as it is: the chunks of pieces that have nothing else differ in
        it alone."""
        return not self._request.has_token_ids

    @abstractmethod
    def opening(self, index: int) -> list[ChatChunkChoice] | list[TextChoice]:
        """What comes before the first piece of a choice."""

    @abstractmethod
    def delta(self, piece: Piece) -> list[ChatChunkChoice] | list[TextChoice]:
        """A piece as chunks' choices."""

    @abstractmethod
    def choice(self, whole: WholeChoice) -> ChatChoice | TextChoice: ...

    def completion(self, choices: Sequence[WholeChoice], usage: Usage) -> str:
        """JSON of the whole answer."""
        return self.whole(choices, usage).model_dump_json()

    def whole(self, choices: Sequence[WholeChoice], usage: Usage) -> Completion:
        return self._object(self.whole_object, [self.choice(choice) for choice in choices], usage)

    def chunk(
        self,
        choices: Sequence[ChatChunkChoice | TextChoice],
        usage: Usage | None = None,
        *,
        has_usage: bool,
    ) -> str:
        """JSON of one chunk."""
        chunk = self._object(self.chunk_object, choices, usage)
        return chunk.model_dump_json(exclude=None if has_usage else {"usage"})

    def _object(
        self,
        kind: Object,
        choices: Sequence[ChatChoice | ChatChunkChoice | TextChoice],
        usage: Usage | None,
    ) -> Completion:
        return Completion(
            id=self._id,
            object=kind,
            created=self._created,
            model=self._model,
            choices=choices,
            usage=usage,
        )


class TextFormat(Format):
    prefix = "cmpl"
    whole_object = chunk_object = "text_completion"

    def opening(self, index: int) -> list[TextChoice]:
        prompt = self._prompt_of(index)
        if prompt.echo is None and not self._request.has_token_ids:
            return []
        text = prompt.echo.text if prompt.echo is not None else ""
        opening = TextChoice(index=index, text=text, logprobs=None, finish_reason=None)
        if self._request.has_token_ids:
            opening.prompt_token_ids, opening.token_ids = prompt.token_ids, ()
        return [opening]

    def delta(self, piece: Piece) -> list[TextChoice]:
        reason: Literal["stop", "length"] | None = (
            piece.finish_reason.value if piece.finish_reason is not None else None
        )
        tokens = piece.tokens if self._request.has_logprobs else ()
        logprobs = self._logprobs(tokens or None)
        more = TextChoice(
            index=piece.index, text=piece.text, logprobs=logprobs, finish_reason=reason
        )
        if self._request.has_token_ids:
            more.token_ids = [token.token_id for token in piece.tokens]
        return [more]

    def _logprobs(self, tokens: Sequence[PieceToken] | None) -> TextLogprobs | None:
        return None if tokens is None else TextLogprobs.of(tokens, self._names)

    def _prompt_of(self, index: int) -> ValidPrompt:
        return self._request.prompts[index // self._request.n]

    def choice(self, whole: WholeChoice) -> TextChoice:
        has_ids = self._request.has_token_ids
        return TextChoice(
            index=whole.index,
            text=whole.text,
            logprobs=self._logprobs(whole.tokens),
            finish_reason=whole.finish_reason.value,
            prompt_logprobs=prompt_logprobs(whole.prompt_tokens, self._names),
            token_ids=whole.token_ids if has_ids else None,
            prompt_token_ids=self._prompt_of(whole.index).token_ids if has_ids else None,
        )
