"""Messages of a chat as a request has them."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from router.errors import BadRequest


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")


class TextPart(_Strict):
    type: Literal["text"]
    text: str


class RefusalPart(_Strict):
    """In an assistant's message that comes back."""

    type: Literal["refusal"]
    refusal: str


class OtherPart(BaseModel):
    """What no model here can see or hear: refused by name."""

    model_config = ConfigDict(extra="allow")
    type: Literal["image_url", "input_audio", "file", "audio_url", "video_url", "input_image"]


Part = Annotated[TextPart | RefusalPart | OtherPart, Field(discriminator="type")]


class CalledFunction(_Strict):
    name: Annotated[str, Field(min_length=1)]
    arguments: str


class ToolCallMessage(_Strict):
    """A call that the assistant made."""

    id: Annotated[str, Field(min_length=1)]
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None  # clients that put a stream together leave it there


class ChatMessage(_Strict):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[Part], Field(min_length=1)] | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCallMessage], Field(max_length=128)] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    """The same, in vLLM's newer word."""
    # Clients send answers back as they got them.
    refusal: str | None = None
    annotations: Annotated[list[object], Field(max_length=0)] | None = None
    audio: None = None
    function_call: None = None

    @property
    def text(self) -> str:
        if self.content is None:
            return self.refusal or ""
        if isinstance(self.content, str):
            return self.content
        return "".join(_text_of(part) for part in self.content)


def check_messages(messages: list[ChatMessage]) -> None:
    """Raises BadRequest, naming the field, if one has what its role has not, or lacks what it has,
    or holds what is not text."""
    for index, message in enumerate(messages):
        where, is_assistant = f"messages.{index}", message.role == "assistant"
        if message.tool_calls is not None and not is_assistant:
            raise _wrong(f"{where}.tool_calls", "only an assistant calls tools")
        if (message.tool_call_id is not None) != (message.role == "tool"):
            raise _wrong(f"{where}.tool_call_id", "a tool's message, and no other, has one")
        if message.content is None and not (
            is_assistant and (message.tool_calls or message.refusal)
        ):
            raise _wrong(f"{where}.content", "it is missing")
        parts = message.content if isinstance(message.content, list) else ()
        for place, part in enumerate(parts):
            if isinstance(part, OtherPart):
                name = f"{where}.content.{place}.type"
                raise _wrong(name, f"{part.type!r} is not supported: models here take text")


def _wrong(param: str, reason: str) -> BadRequest:
    return BadRequest(f"Invalid value for '{param}': {reason}.", param=param)


def _text_of(part: TextPart | RefusalPart | OtherPart) -> str:
    match part:
        case TextPart(text=text):
            return text
        case RefusalPart(refusal=text):
            return text
    raise AssertionError("refused before")
