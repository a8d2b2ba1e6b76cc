"""What a chat's answer is held to, as one grammar: reasoning before it, calls of tools in it.

    reasoning    a model that thinks is free until its end tag; what is asked of its answer holds
                 behind it
    forced       nothing but calls
    else         free text, in which a call, once begun, is held to its form; or, where the answer
                 itself has a form, either that or calls

A call names a tool that may be called, and its arguments fit the tool's schema: to the letter if it
is `strict`, else as far as a grammar can hold it.
"""

import re
from collections.abc import Callable, Sequence
from functools import partial

from router.errors import BadRequest
from router.grammar_bounds import check_schema
from router.parsers import reasoning
from router.structured_output import Wanted
from router.tool_format import ToolFormat
from router.tool_schemas import NO_PARAMETERS, Tool, ToolUse
from runtime.grammar import GrammarError, composed, of_json_schema, quoted

_ANY = r"(.|\n)*"
_ANSWER = "answer"


def chat_grammar(
    answer: Wanted | None,
    use: ToolUse | None,
    format: ToolFormat | None,
    token_of: Callable[[str], int | None],
    *,
    thinks: bool,
    is_thinking: bool,
) -> Wanted | None:
    """None: the answer is free. `thinks`: the model may reason before it answers; `is_thinking`: it
    has begun to. `token_of` gives the id of a text that is one token of its own. Raises
    BadRequest."""
    if use is not None and not use.is_held and answer is None:
        use = None
    if use is None:
        if answer is None or not thinks:
            return answer
        rules = _Rules(token_of, thinks=thinks, is_thinking=is_thinking)
        return Wanted(answer.param, partial(rules.of_answer, answer))
    assert format is not None, "refused before"
    if answer is not None and use.is_forced:
        raise BadRequest(
            f"{answer.param!r} has no answer to hold where 'tool_choice' forces a call.",
            param=answer.param,
        )
    rules = _Rules(token_of, thinks=thinks, is_thinking=is_thinking)
    param = "tools" if answer is None else answer.param
    return Wanted(param, partial(rules.of_calls, use, format, answer))


class _Rules:
    """Writes Lark."""

    def __init__(
        self, token_of: Callable[[str], int | None], *, thinks: bool, is_thinking: bool
    ) -> None:
        self._token_of = token_of
        self._thinks = thinks
        self._is_thinking = is_thinking

    def of_answer(self, answer: Wanted) -> str:
        return composed(self._with_thought([f"@{_ANSWER}"]), {_ANSWER: answer.write()})

    def of_calls(self, use: ToolUse, format: ToolFormat, answer: Wanted | None) -> str:
        names = {tool.name: f"args_{index}" for index, tool in enumerate(use.callable)}
        parts = {names[tool.name]: _arguments(tool) for tool in use.callable}
        calls = " | ".join(
            format.call(name, f"@{rule}", self._mark) for name, rule in names.items()
        )
        block = format.block("call", is_one=use.is_single)
        lines = [f"call: {calls}"]
        if use.is_forced or answer is not None:
            start = _repeated(f"{self._mark(format.trigger)} {block}", use, format)
            if answer is not None:
                parts[_ANSWER] = answer.write()
                start = f"@{_ANSWER} | {start}"
        else:
            start = f"text | head {block} text" if use.is_single else f"(head {block})* text"
            lines += self._free_text(format)
        return composed(self._with_thought([start], lines), parts)

    def _free_text(self, format: ToolFormat) -> list[str]:
        """`text` without a trigger, and `head`: such a text, and a trigger."""
        text = f"TEXT: /{_ANY}/ & ~/{_ANY}({_in_regex(format.never)}){_ANY}/"
        trigger = self._mark(format.trigger)
        attribute = "" if self._token_of(format.trigger) is not None else "[lazy]"
        return [text, "text: TEXT", f"head{attribute}: TEXT {trigger}"]

    def _with_thought(self, start: Sequence[str], lines: Sequence[str] = ()) -> str:
        rules = [f"body: {' '.join(start)}", *lines]
        if not self._thinks:
            return "\n".join(["start: body", *rules])
        close = self._mark(reasoning.CLOSE)
        attribute = "" if self._token_of(reasoning.CLOSE) is not None else "[lazy]"
        rules += [
            f"THOUGHT: /{_ANY}/ & ~/{_ANY}({_in_regex(re.escape(reasoning.CLOSE))}){_ANY}/",
            f"thought{attribute}: THOUGHT {close}",
            r"SPACE: /[ \n]{0,4}/",
        ]
        if self._is_thinking:
            return "\n".join(["start: thought SPACE body", *rules])
        opened = self._mark(reasoning.OPEN)
        return "\n".join([f"start: ({opened} thought SPACE)? body", *rules])

    def _mark(self, text: str) -> str:
        token_id = self._token_of(text)
        return quoted(text) if token_id is None else f"<[{token_id}]>"


def _repeated(once: str, use: ToolUse, format: ToolFormat) -> str:
    if use.is_single or format.is_list:
        return once
    return f"{once} ({quoted(format.separator)} {once})*" if format.separator else f"({once})+"


def _in_regex(pattern: str) -> str:
    return pattern.replace("/", r"\/")


def _arguments(tool: Tool) -> str:
    told = tool.function.parameters
    schema = {"type": "object", **(NO_PARAMETERS if told is None else told)}
    if schema["type"] != "object":
        raise GrammarError(f"the parameters of {tool.name!r} are no object")
    try:
        check_schema(schema)
        return of_json_schema(schema, {"lenient": not tool.function.strict})
    except GrammarError as error:
        raise GrammarError(f"the parameters of {tool.name!r}: {error}") from error
