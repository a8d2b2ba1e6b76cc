"""Whatever a model says under a chat's grammar, its calls are of tools, with right arguments."""

import json
import random
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer

from router.errors import BadRequest
from router.parsers.hermes import HermesParser
from router.structured_output import Wanted
from router.tool_format import (
    HermesFormat,
    LlamaFormat,
    MistralFormat,
    NamedMistralFormat,
    ToolFormat,
)
from router.tool_grammar import chat_grammar
from router.tool_schemas import ToolFields, tool_use
from runtime.grammar import Vocabulary, of_json_schema
from tests.router.model_folder import byte_level_tokenizer
from tests.router.parsers.pieces import calls_of, parsed, text_of

CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"$ref": "#/$defs/days"}},
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"days": {"type": "integer", "minimum": 1, "maximum": 9}},
}
SCHEMAS = {"get_weather": CITY, "ping": {"type": "object", "additionalProperties": False}}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "parameters": CITY, "strict": True}},
    {"type": "function", "function": {"name": "ping"}},
]
FORMATS = [HermesFormat(), LlamaFormat(), MistralFormat(), NamedMistralFormat()]
MARKS = {mark for format in FORMATS for mark in format.marks} | {"<think>", "</think>"}


class Model:
    """A tokenizer, and what may be said with it."""

    def __init__(self, folder: Path, *, has_marks: bool) -> None:
        self.tokenizer: Tokenizer = byte_level_tokenizer()
        if has_marks:
            marks = [AddedToken(mark, special=mark.startswith("[")) for mark in sorted(MARKS)]
            self.tokenizer.add_tokens(marks)
        self.tokenizer.save(str(folder / "tokenizer.json"))
        self.vocabulary = Vocabulary.from_folder(folder, self.tokenizer.get_vocab_size(), [1])

    def token_of(self, text: str) -> int | None:
        token_id: int | None = self.tokenizer.token_to_id(text)
        return token_id

    def may_say(self, grammar: str, text: str) -> bool:
        """It may, and end."""
        state = self.vocabulary.compile(grammar)
        row = np.zeros(self.vocabulary.row_size, dtype=np.int32)
        for token_id in self.tokenizer.encode(text).ids:
            state.fill(row)
            if not row[token_id // 32] >> token_id % 32 & 1:
                return False
            state.advance([token_id])
        return state.may_end

    def babble(self, grammar: str, seed: int) -> str:
        """Anything that may be said, to its end."""
        state, rng = self.vocabulary.compile(grammar), random.Random(seed)
        row = np.zeros(self.vocabulary.row_size, dtype=np.int32)
        said: list[int] = []
        while True:
            state.fill(row)
            may_come = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))
            token_id = 1 if 1 in may_come else int(rng.choice(may_come))
            if token_id == 1:
                return str(self.tokenizer.decode(said, skip_special_tokens=False))
            state.advance([token_id])
            said.append(token_id)
            assert len(said) < 2000


@pytest.fixture(scope="module", params=[True, False], ids=["tokens", "letters"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(tmp_path_factory.mktemp("marks"), has_marks=request.param)


def grammar_of(
    model: Model,
    format: ToolFormat,
    *,
    thinks: bool = False,
    is_thinking: bool = False,
    answer: Wanted | None = None,
    **fields: object,
) -> str:
    use = tool_use(ToolFields.model_validate({"tools": TOOLS, **fields}))
    wanted = chat_grammar(
        answer, use, format, model.token_of, thinks=thinks, is_thinking=is_thinking
    )
    assert wanted is not None
    return wanted.write()


def check_calls(calls: Sequence[tuple[str, str]]) -> None:
    for name, arguments in calls:
        jsonschema.validate(json.loads(arguments), SCHEMAS[name])


@pytest.mark.parametrize("format", FORMATS, ids=lambda format: type(format).__name__)
def test_a_forced_call_is_one(model: Model, format: ToolFormat) -> None:
    grammar = grammar_of(model, format, tool_choice="required")
    for seed in range(8):
        events = parsed(format.parser(SCHEMAS), [model.babble(grammar, seed)])
        assert len(calls_of(events)) == 1 or (format.is_list and calls_of(events))
        assert not text_of(events)
        check_calls(calls_of(events))
    assert not model.may_say(grammar, "No.")


@pytest.mark.parametrize("format", FORMATS, ids=lambda format: type(format).__name__)
def test_a_named_function_is_called_once(model: Model, format: ToolFormat) -> None:
    named = {"type": "function", "function": {"name": "ping"}}
    grammar = grammar_of(model, format, tool_choice=named)
    events = parsed(format.parser(SCHEMAS), [model.babble(grammar, 1)])
    ((name, arguments),) = calls_of(events)
    assert (name, json.loads(arguments)) == ("ping", {})


CALLS = {
    "HermesFormat": '<tool_call>\n{"name": "ping", "arguments": {}}\n</tool_call>',
    "LlamaFormat": '{"name": "ping", "parameters": {}}',
    "MistralFormat": '[TOOL_CALLS][{"name": "ping", "arguments": {}}]',
    "NamedMistralFormat": "[TOOL_CALLS]ping[ARGS]{}",
}
BAD = {
    "HermesFormat": '<tool_call>\n{"name": "pong", "arguments": {}}\n</tool_call>',
    "LlamaFormat": '{"name": "ping", "parameters": {"a": 1}}',
    "MistralFormat": '[TOOL_CALLS][{"name": "get_weather", "arguments": {}}]',
    "NamedMistralFormat": '[TOOL_CALLS]ping[ARGS]{"a": 1}',
}


@pytest.mark.parametrize("format", FORMATS, ids=lambda format: type(format).__name__)
def test_free_text_and_calls_that_hold(model: Model, format: ToolFormat) -> None:
    good, bad = CALLS[type(format).__name__], BAD[type(format).__name__]
    many = grammar_of(model, format, tool_choice="auto")
    for text in ("Hello {there}!", good, f"Let me see: {good}", f"{good} and {good}.", ""):
        assert model.may_say(many, text), text
    for text in (bad, f"Well {bad}", f"{good}{bad}", f"{good[:-1]}"):
        assert not model.may_say(many, text), text
    single = grammar_of(model, format, parallel_tool_calls=False)
    for text in ("Hello!", f"One: {good} there."):
        assert model.may_say(single, text), text
    assert not model.may_say(single, f"{good} {good}")
    allowed = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "get_weather"}}]}
    choice = {"type": "allowed_tools", "allowed_tools": allowed}
    assert not model.may_say(grammar_of(model, format, tool_choice=choice), good)


def test_several_at_once(model: Model) -> None:
    grammar = grammar_of(model, HermesFormat(), tool_choice="required")
    assert model.may_say(grammar, "\n".join([CALLS["HermesFormat"]] * 2))
    grammar = grammar_of(model, MistralFormat(), tool_choice="required")
    two = '{"name": "ping", "arguments": {}}, {"name": "ping", "arguments": {}}'
    assert model.may_say(grammar, f"[TOOL_CALLS][{two}]")


def test_reasoning_is_free_and_comes_first(model: Model) -> None:
    grammar = partial(grammar_of, model, HermesFormat(), thinks=True, tool_choice="required")
    call = CALLS["HermesFormat"]
    assert model.may_say(grammar(), f"<think>\nHm, <b>.\n</think>\n\n{call}")
    assert model.may_say(grammar(), call)
    assert not model.may_say(grammar(), "<think>\nHm.\n</think>\n\nNo.")
    assert model.may_say(grammar(is_thinking=True), f"Hm.</think>{call}")
    assert not model.may_say(grammar(is_thinking=True), call)


def number(**options: Any) -> Wanted:
    return Wanted("response_format", lambda: of_json_schema({"type": "integer"}, options))


def test_an_answer_of_a_form_or_calls(model: Model) -> None:
    grammar = grammar_of(model, HermesFormat(), answer=number(), tool_choice="auto")
    for text in ("42", CALLS["HermesFormat"]):
        assert model.may_say(grammar, text)
    for text in ("Hm.", f"42{CALLS['HermesFormat']}", BAD["HermesFormat"]):
        assert not model.may_say(grammar, text)
    with pytest.raises(BadRequest, match="forces a call"):
        grammar_of(model, HermesFormat(), answer=number(), tool_choice="required")


def test_an_answer_of_a_form_after_reasoning(model: Model) -> None:
    wanted = chat_grammar(number(), None, None, model.token_of, thinks=True, is_thinking=False)
    assert wanted is not None
    assert model.may_say(wanted.write(), "<think>What?</think>42")
    assert not model.may_say(wanted.write(), "<think>What?</think>Hm")


def test_nothing_to_hold(model: Model) -> None:
    free = [{"type": "function", "function": {"name": "f"}}]
    use = tool_use(ToolFields.model_validate({"tools": free}))
    token_of = model.token_of
    assert not chat_grammar(None, use, HermesFormat(), token_of, thinks=True, is_thinking=True)
    assert parsed(HermesParser(), ["Hi."])
