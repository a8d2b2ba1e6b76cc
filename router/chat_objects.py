"""OpenAI's objects of a chat's answer, whole and in chunks."""

from collections.abc import Sequence
from typing import Literal

from pydantic import BaseModel, Field

from router.logprobs import ChatLogprobs


def is_none(value: object) -> bool:
    return value is None


Reason = Literal["stop", "length", "tool_calls"]


class CalledFunction(BaseModel):
    name: str
    arguments: str


class ToolCall(BaseModel):
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class FunctionDelta(BaseModel):
    name: str | None = Field(default=None, exclude_if=is_none)
    arguments: str


class ToolCallDelta(BaseModel):
    """The first of a call has all; the others more of its arguments."""

    index: int
    id: str | None = Field(default=None, exclude_if=is_none)
    type: Literal["function"] | None = Field(default=None, exclude_if=is_none)
    function: FunctionDelta


class AssistantMessage(BaseModel):
    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    tool_calls: list[ToolCall] | None = Field(default=None, exclude_if=is_none)
    reasoning_content: str | None = Field(default=None, exclude_if=is_none)
    """Beyond OpenAI's: what the model thought, in DeepSeek's word."""
    reasoning: str | None = Field(default=None, exclude_if=is_none)
    """The same in vLLM's."""


Delta = dict[
    Literal["role", "content", "reasoning_content", "reasoning", "tool_calls"],
    str | list[ToolCallDelta],
]


class ChatChoice(BaseModel):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: Reason
    token_ids: Sequence[int] | None = Field(default=None, exclude_if=is_none)
    """Beyond OpenAI's, as vLLM has it."""


class ChatChunkChoice(BaseModel):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: Reason | None = None
    token_ids: Sequence[int] | None = Field(default=None, exclude_if=is_none)
