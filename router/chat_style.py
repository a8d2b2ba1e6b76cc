"""What a model's chats are like: how it calls tools, whether it thinks first.

Read off its chat template at the start, unless flags say it. From a chat's body it makes the prompt
and what takes the output apart.
"""

import asyncio
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal, TypeVar

from router.chat_messages import template_messages, written_out
from router.errors import BadRequest, TemplateOccupied
from router.parsers import llama, mistral, reasoning
from router.parsers.output import OutputParser
from router.parsers.reasoning import ReasoningParser
from router.request import OutputForm
from router.schemas import ChatBody
from router.tokenizer import TextTokenizer
from router.tool_format import (
    HermesFormat,
    LlamaFormat,
    MistralFormat,
    NamedMistralFormat,
    ToolFormat,
)
from router.tool_schemas import ToolUse
from runtime.log import get_logger

log = get_logger()

ToolCallParser = Literal["auto", "none", "hermes", "llama3_json", "mistral"]
ReasoningStyle = Literal["auto", "none", "qwen3", "deepseek_r1"]

_HERE = "\0here\0"
"""Put behind the last message, to find its end in what a template makes of it."""


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    token_ids: tuple[int, ...]
    is_thinking: bool
    """It ends where the model thinks."""


_NUM_THREADS = 2
"""One chat is rendered at a time; another is turned into tokens meanwhile."""
_PATIENCE_S = 30.0
"""For those before a chat and for itself, in all; a rendering has its own bound
(router/template_process.py), and so has its process's start."""

T = TypeVar("T")


class ChatStyle:
    def __init__(
        self,
        tokenizer: TextTokenizer,
        tool_call_parser: ToolCallParser = "auto",
        reasoning_parser: ReasoningStyle = "auto",
    ) -> None:
        self._tokenizer = tokenizer
        self._threads = ThreadPoolExecutor(_NUM_THREADS, "chat")
        template = tokenizer.chat_template
        source = template.source if template is not None else ""
        self._knows_tools = template is not None and template.knows_tools
        self.format = _format(tool_call_parser, source, self._knows_tools, tokenizer.token_of)
        is_thinker = reasoning.CLOSE in source if reasoning_parser == "auto" else True
        self.thinks = is_thinker and reasoning_parser != "none"
        self._always_thinks = reasoning_parser == "deepseek_r1"
        log.info(
            "chats",
            tools=self.format.name if self.format is not None else "none",
            tools_told="by the template" if self._knows_tools else "by a system message",
            reasoning=self.thinks,
        )

    def check(self, use: ToolUse | None) -> ToolFormat | None:
        """The format of calls, if there are tools. Raises BadRequest if the model has none."""
        if use is not None and self.format is None:
            raise BadRequest(
                "'tools' are not supported with this model: how it writes calls is not known. "
                "The router's --tool-call-parser says it.",
                param="tools",
                code="unsupported_parameter",
            )
        return self.format if use is not None else None

    async def on_thread(self, work: Callable[[], T]) -> T:
        """For what calls `prompt`: chats whose template takes long take no threads of others.
        Raises what `work` raises, and TemplateOccupied where too many wait."""
        running = asyncio.get_running_loop().run_in_executor(self._threads, work)
        try:
            async with asyncio.timeout(_PATIENCE_S):
                return await running
        except TimeoutError as error:
            raise TemplateOccupied from error

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def prompt(self, body: ChatBody, use: ToolUse | None) -> ChatPrompt:
        """Raises BadRequest, as the template says."""
        text = self.render(body, use)
        always = self._always_thinks and not body.continue_final_message
        is_thinking = self.thinks and (always or text.rstrip().endswith(reasoning.OPEN))
        # Templates write special tokens out; only who says so gets them twice.
        encode = self._tokenizer.encode if body.add_special_tokens else self._tokenizer.encode_bare
        return ChatPrompt(encode(text), is_thinking)

    def render(self, body: ChatBody, use: ToolUse | None) -> str:
        template = self._tokenizer.template
        messages = template_messages(body.messages, self.format.id_chars if self.format else 24)
        if body.continue_final_message:
            messages[-1]["content"] += _HERE
        shown = use.shown if use is not None else ()
        if not self._knows_tools:
            messages = written_out(messages, shown)
            shown = ()
        tools = [tool.model_dump(exclude_none=True) for tool in shown]
        text = template.render(
            messages,
            tools=tools or None,
            add_generation_prompt=body.add_generation_prompt and not body.continue_final_message,
            variables={**self._of_effort(body.reasoning_effort), **body.chat_template_kwargs},
        )
        return _until_here(text) if body.continue_final_message else text

    def _of_effort(self, effort: str | None) -> dict[str, object]:
        """What the template calls it."""
        names = self._tokenizer.template.variables
        if effort is None or (effort == "none" and not self.thinks):
            return {}
        if "reasoning_effort" in names:
            return {"reasoning_effort": effort}
        if effort == "none" and "enable_thinking" in names:
            return {"enable_thinking": False}
        raise BadRequest(
            f"'reasoning_effort' {effort!r} is not supported: this model's chat template has no "
            "place for it.",
            param="reasoning_effort",
            code="unsupported_parameter",
        )

    def output(
        self, body: ChatBody, use: ToolUse | None, *, is_thinking: bool
    ) -> OutputForm | None:
        """None: the text is the answer."""
        format = self.check(use)
        if format is None and not self.thinks:
            return None
        names = [tool.name for tool in use.callable] if use is not None else []

        def new_parser() -> OutputParser:
            thoughts = ReasoningParser(is_open=is_thinking) if self.thinks else None
            calls = format.parser(names) if format is not None else None
            return OutputParser(thoughts, calls, is_silent=not body.include_reasoning)

        return OutputForm(new_parser, format.id_chars if format is not None else 0)

    def shown_token_ids(self, use: ToolUse | None) -> frozenset[int]:
        """Special tokens that are text here."""
        marks: Collection[str] = self.format.marks if use is not None and self.format else ()
        if self.thinks:
            marks = [*marks, reasoning.OPEN, reasoning.CLOSE]
        ids = map(self._tokenizer.token_of, marks)
        return frozenset(token_id for token_id in ids if token_id is not None)


def _until_here(text: str) -> str:
    before, mark, _ = text.rpartition(_HERE)
    if not mark:
        raise BadRequest(
            "'continue_final_message' needs a last message that the chat template shows.",
            param="continue_final_message",
        )
    return before


def _format(
    parser: ToolCallParser,
    source: str,
    knows_tools: bool,
    token_of: Callable[[str], int | None],
) -> ToolFormat | None:
    if parser == "auto":
        parser = _detected(source, knows_tools)
    match parser:
        case "hermes":
            return HermesFormat()
        case "llama3_json":
            return LlamaFormat()
        case "mistral":
            is_named = token_of(mistral.ARGS) is not None
            return NamedMistralFormat() if is_named else MistralFormat()
    return None


def _detected(source: str, knows_tools: bool) -> ToolCallParser:
    if not knows_tools:
        return "hermes"  # the system message says so
    if mistral.TAG in source:
        return "mistral"
    if HermesFormat.trigger in source:
        return "hermes"
    if llama.TAG in source or ("<|eot_id|>" in source and '"parameters"' in source):
        return "llama3_json"
    return "none"
