"""OpenAI's response objects: chat completions and text completions, whole and in chunks.

The two differ in their shape only, a `Format` each. What is sent when is router/answer.py's.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel

from router.generation import Piece
from router.request import FinishReason, RequestId

Reason = Literal["stop", "length"]
Object = Literal["chat.completion", "chat.completion.chunk", "text_completion"]


@dataclass(frozen=True, slots=True)
class WholeChoice:
    index: int
    text: str
    finish_reason: FinishReason


class AssistantMessage(BaseModel):
    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class ChatChoice(BaseModel):
    index: int
    message: AssistantMessage
    logprobs: None = None
    finish_reason: Reason


class ChatChunkChoice(BaseModel):
    index: int
    delta: dict[Literal["role", "content"], str]
    finish_reason: Reason | None = None


class TextChoice(BaseModel):
    """Of a whole completion, and of a chunk."""

    index: int
    text: str
    logprobs: None = None
    finish_reason: Reason | None


class PromptTokensDetails(BaseModel):
    cached_tokens: int


class Usage(BaseModel):
    prompt_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens: int
    total_tokens: int


class Completion(BaseModel):
    """An answer, or a chunk of one. Chunks have `usage` only if the client asked for it; then it
    is null in all but the last."""

    id: str
    object: Object
    created: int
    model: str
    choices: Sequence[ChatChoice | ChatChunkChoice | TextChoice]
    usage: Usage | None = None


class Format(ABC):
    """The shape of one request's answer."""

    prefix: str
    whole_object: Object
    chunk_object: Object

    def __init__(self, request_id: RequestId, model: str) -> None:
        self._id = f"{self.prefix}-{request_id}"
        self._model = model
        self._created = int(time.time())

    @abstractmethod
    def opening(self, index: int) -> list[ChatChunkChoice]:
        """What comes before the first piece of a choice."""

    @abstractmethod
    def delta(self, piece: Piece) -> list[ChatChunkChoice] | list[TextChoice]:
        """A piece as chunks' choices."""

    @abstractmethod
    def choice(self, whole: WholeChoice) -> ChatChoice | TextChoice: ...

    def completion(self, choices: Sequence[WholeChoice], usage: Usage) -> str:
        """JSON of the whole answer."""
        return self._object(
            self.whole_object, [self.choice(choice) for choice in choices], usage
        ).model_dump_json()

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


class ChatFormat(Format):
    prefix = "chatcmpl"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def opening(self, index: int) -> list[ChatChunkChoice]:
        return [ChatChunkChoice(index=index, delta={"role": "assistant", "content": ""})]

    def delta(self, piece: Piece) -> list[ChatChunkChoice]:
        index, reason = piece.index, piece.finish_reason
        choices = []
        if piece.text:
            choices.append(ChatChunkChoice(index=index, delta={"content": piece.text}))
        if reason is not None:
            choices.append(ChatChunkChoice(index=index, delta={}, finish_reason=reason.value))
        return choices

    def choice(self, whole: WholeChoice) -> ChatChoice:
        return ChatChoice(
            index=whole.index,
            message=AssistantMessage(content=whole.text),
            finish_reason=whole.finish_reason.value,
        )


class TextFormat(Format):
    prefix = "cmpl"
    whole_object = chunk_object = "text_completion"

    def opening(self, index: int) -> list[ChatChunkChoice]:
        return []

    def delta(self, piece: Piece) -> list[TextChoice]:
        reason: Reason | None = (
            piece.finish_reason.value if piece.finish_reason is not None else None
        )
        return [TextChoice(index=piece.index, text=piece.text, finish_reason=reason)]

    def choice(self, whole: WholeChoice) -> TextChoice:
        reason: Reason = whole.finish_reason.value
        return TextChoice(index=whole.index, text=whole.text, finish_reason=reason)
