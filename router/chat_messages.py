"""A chat's messages as a template takes them.

Templates want the arguments of calls as objects. A template that knows no tools is told of them by
a system message in Hermes' form, and of calls and results in the text of messages. Pure.
"""

import hashlib
import json
from collections.abc import Sequence
from typing import NotRequired, TypedDict

from pydantic_core import from_json

from router.message_schemas import ChatMessage, ToolCallMessage
from router.parsers import hermes
from router.tool_schemas import Tool


class Function(TypedDict):
    name: str
    arguments: dict[str, object] | str


class ToolCall(TypedDict):
    id: str
    type: str
    function: Function


class Message(TypedDict):
    role: str
    content: str
    name: NotRequired[str]
    tool_calls: NotRequired[list[ToolCall]]
    tool_call_id: NotRequired[str]
    reasoning_content: NotRequired[str]


def template_messages(messages: Sequence[ChatMessage], id_chars: int) -> list[Message]:
    """`id_chars`: how long ids of calls are in this model's format."""
    return [_message(message, id_chars) for message in messages]


def _message(message: ChatMessage, id_chars: int) -> Message:
    # `developer` is OpenAI's newer word; models were trained on `system`.
    role = "system" if message.role == "developer" else message.role
    told: Message = {"role": role, "content": message.text}
    if message.name is not None:
        told["name"] = message.name
    if message.tool_calls:
        told["tool_calls"] = [_call(call, id_chars) for call in message.tool_calls]
    if message.tool_call_id is not None:
        told["tool_call_id"] = _id(message.tool_call_id, id_chars)
    if (thought := message.reasoning_content or message.reasoning) is not None:
        told["reasoning_content"] = thought
    return told


def _call(call: ToolCallMessage, id_chars: int) -> ToolCall:
    function: Function = {
        "name": call.function.name,
        "arguments": _arguments(call.function.arguments),
    }
    return {"id": _id(call.id, id_chars), "type": "function", "function": function}


def _arguments(text: str) -> dict[str, object] | str:
    """As they stand, if they are no object: what was cut off comes back too."""
    try:
        value = from_json(text or "{}")  # no half of a surrogate pair, no depth without end
    except ValueError:
        return text
    return value if isinstance(value, dict) else text


def _id(told: str, id_chars: int) -> str:
    """Ids of other servers have other lengths, and templates may refuse those of nine letters."""
    if id_chars >= 24 or len(told) == id_chars:
        return told
    return hashlib.blake2b(told.encode(errors="surrogatepass")).hexdigest()[:id_chars]


def written_out(messages: Sequence[Message], tools: Sequence[Tool]) -> list[Message]:
    """The same for a template that knows neither tools nor calls."""
    told: list[Message] = []
    after_result = False
    for message in messages:
        is_result = message["role"] == "tool"
        text = f"<tool_response>\n{message['content']}\n</tool_response>"
        if is_result and after_result:  # templates may want roles to alternate
            told[-1]["content"] += f"\n{text}"
        elif is_result:
            told.append({"role": "user", "content": text})
        else:
            told.append(_without_calls(message))
        after_result = is_result
    return _with_system(told, tools) if tools else told


def _without_calls(message: Message) -> Message:
    if "tool_calls" not in message:
        return message
    texts = [message["content"]] if message["content"] else []
    for call in message["tool_calls"]:
        text = json.dumps(call["function"], ensure_ascii=False)
        texts.append(f"{hermes.OPEN}\n{text}\n{hermes.CLOSE}")
    return {"role": message["role"], "content": "\n".join(texts)}


def _with_system(messages: list[Message], tools: Sequence[Tool]) -> list[Message]:
    text = _told_of(tools)
    if messages and messages[0]["role"] == "system":
        first = messages[0]
        content = f"{first['content']}\n\n{text}" if first["content"] else text
        return [{**first, "content": content}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def _told_of(tools: Sequence[Tool]) -> str:
    lines = "\n".join(
        json.dumps(tool.model_dump(exclude_none=True), ensure_ascii=False) for tool in tools
    )
    return (
        "# Tools\n\nThese functions can be called, one JSON object each:\n"
        f"<tools>\n{lines}\n</tools>\n\n"
        "To call one, write its name and its arguments as JSON between these tags, "
        "once for each call:\n"
        f'{hermes.OPEN}\n{{"name": "…", "arguments": {{…}}}}\n{hermes.CLOSE}'
    )
