"""Calls of tools in a model's text, whatever pieces it comes in."""

import json
import time
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.parsers.chars import ToolParser
from router.parsers.events import CallArguments, CallBegin, Text
from router.parsers.hermes import HermesParser
from router.parsers.llama import TAG as PYTHON_TAG
from router.parsers.llama import LlamaParser
from router.parsers.mistral import MistralParser
from tests.router.parsers.pieces import ARGUMENTS, CUTS, calls_of, check_pieces, parsed, text_of

NAMES = ("get_weather", "add")
Call = tuple[str, dict[str, object]]


def llama() -> LlamaParser:
    return LlamaParser(NAMES)


PARSERS: dict[str, Callable[[], ToolParser]] = {
    "hermes": HermesParser,
    "llama": llama,
    "mistral": MistralParser,
}


def written(form: str, calls: list[Call]) -> str:
    key = "parameters" if form == "llama" else "arguments"
    objects = [json.dumps({"name": name, key: args}) for name, args in calls]
    match form:
        case "hermes":
            return "\n".join(f"<tool_call>\n{text}\n</tool_call>" for text in objects)
        case "llama":
            return "; ".join(objects)
        case "mistral":
            return f"[TOOL_CALLS][{', '.join(objects)}]"
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{json.dumps(args)}" for name, args in calls)


CALLS = st.lists(st.tuples(st.sampled_from(NAMES), ARGUMENTS), min_size=1, max_size=3)
PROSE = st.text(st.characters(exclude_characters="<[{"), max_size=12)


@pytest.mark.parametrize("form", [*PARSERS, "mistral-named"])
@settings(deadline=None)
@given(calls=CALLS, before=PROSE, after=PROSE, cuts=CUTS)
def test_calls_and_the_text_around_them(
    form: str, calls: list[Call], before: str, after: str, cuts: list[int]
) -> None:
    after = after.lstrip(" \t\r\n;")
    text = f"{before}{written(form, calls)}{after}"
    events = check_pieces(PARSERS[form.partition("-")[0]], text, cuts)
    assert [(name, json.loads(args)) for name, args in calls_of(events)] == calls
    assert text_of(events) == (before if before.strip(" \t\r\n") else "") + after


@pytest.mark.parametrize("form", [*PARSERS, "mistral-named"])
def test_it_is_known_whether_the_last_call_is_whole(form: str) -> None:
    arguments = {"a": ["}", {"b": '"'}], "c": 1}
    text = written(form, [("add", arguments), ("get_weather", arguments)])
    for end in range(len(text) + 1):
        parser = PARSERS[form.partition("-")[0]]()
        calls = calls_of([*parser.push(text[:end]), *parser.finish()])
        assert parser.is_cut == (bool(calls) and calls[-1][1] != json.dumps(arguments)), text[:end]


FRAGMENTS = st.sampled_from(
    [
        *("<tool_call>", "</tool_call>", "<tool", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "["),
        *('{"name": "add", "arguments": {"a": 1}}', '{"name": "add"', ', "parameters": ', "{", "}"),
        *('"', "\\", ",", ":", "]", " ", "\n", "null", '"{\\"a\\": 2}"', "<|python_tag|>", "; "),
        *("add", '"name"', '"type": "function"', "é", "Hello"),
    ]
)


@pytest.mark.parametrize("form", PARSERS)
@settings(deadline=None)
@given(fragments=st.lists(FRAGMENTS, max_size=14), cuts=CUTS)
def test_anything_means_the_same_in_any_pieces(
    form: str, fragments: list[str], cuts: list[int]
) -> None:
    text = "".join(fragments)
    events = check_pieces(PARSERS[form], text, cuts)
    if not calls_of(events):
        assert text_of(events) == (text.replace(PYTHON_TAG, "") if form == "llama" else text)


@pytest.mark.parametrize(
    ("form", "text", "expected"),
    [
        ("hermes", '<tool_call>{"arguments": {"a": "}"}, "name": "f"}</tool_call>', '{"a": "}"}'),
        ("hermes", '<tool_call>{"name": "f"}</tool_call>', "{}"),
        ("hermes", '<tool_call>{"name": "f", "arguments": null}</tool_call>', "{}"),
        ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', '{"a": 1}'),
        ("hermes", '<tool_call>{"id": [{}], "name": "f", "arguments": [1], "x": ["}"]}', "[1]"),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1', '{"a": 1'),
        ("llama", '<|python_tag|>{"type": "function", "name": "add", "parameters": {}}', "{}"),
        ("mistral", '[TOOL_CALLS]{"name": "f", "arguments": {"a": "\\""}}', '{"a": "\\""}'),
        ("mistral", '[TOOL_CALLS]f[CALL_ID]abc123def[ARGS]{"a": 1}', '{"a": 1}'),
    ],
)  # fmt: skip
def test_other_ways_to_write_one(form: str, text: str, expected: str) -> None:
    events = check_pieces(PARSERS[form], text, [5, 30])
    assert [arguments for _, arguments in calls_of(events)] == [expected]
    assert not text_of(events)


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("hermes", "a < b <tool_call>not JSON</tool_call>"),
        ("hermes", "<tool_call>"),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": 5}</tool_call>'),
        ("hermes", '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>'),
        ("llama", '{"name": "Alice", "parameters": {}}'),
        ("llama", '{"name": "add", "age": 3}'),
        ("llama", '{"name": "add'),
        ("llama", '{"answer": {"name": 1}}'),
        ("mistral", "[TOOL_CALLS]Sorry, no."),
        ("mistral", "see [1] and [TOOL"),
    ],
)
def test_what_is_no_call_is_text(form: str, text: str) -> None:
    assert check_pieces(PARSERS[form], text, [3, 14]) == [Text(text)]


def test_one_that_is_no_call_hides_none_behind_it() -> None:
    good = '<tool_call>{"name": "f", "arguments": {}}'  # nor does a missing end tag
    events = check_pieces(HermesParser, f"<tool_call>oh {good}{good}</tool_call>.", [20])
    assert calls_of(events) == [("f", "{}"), ("f", "{}")]
    assert text_of(events) == "<tool_call>oh ."


def test_arguments_come_as_they_are_written() -> None:
    parser = HermesParser()
    assert parser.push('<tool_call>{"name": "f", "arguments": {') == [
        CallBegin("f"),
        CallArguments("{"),
    ]
    told = [parser.push(piece) for piece in ('"ci', 'ty": ', '"Rome"}}')]
    assert told == [[CallArguments(text)] for text in ('"ci', 'ty": ', '"Rome"}')]


@pytest.mark.parametrize("form", PARSERS)
@pytest.mark.parametrize(
    "unit",
    ["{", "[TOOL_CALLS][", "<tool_call>{", '{"type": "function", ', '<tool_call>{"name": "f"}',
     '{"name": "add", "parameters": ', "<|python_tag|>", '[TOOL_CALLS]{"a": [', "\\", '"', " "],
)  # fmt: skip
def test_no_text_is_slow_or_deep(form: str, unit: str) -> None:
    begin = time.thread_time()
    parsed(PARSERS[form](), [unit] * (40_000 // len(unit)))
    assert time.thread_time() - begin < 2
