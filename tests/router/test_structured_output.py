"""Fields of a body to one grammar: names, defaults, and what excludes what."""

import json
from typing import Any

import pytest

from router.errors import BadRequest
from router.schemas import CompletionBody
from router.structured_output import Wanted, wanted_grammar
from runtime.grammar import WHITESPACE, of_choices, of_ebnf, of_json_schema, of_regex

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
NAMED = {"name": "n", "schema": SCHEMA}


def wanted(**fields: Any) -> Wanted | None:
    return wanted_grammar(CompletionBody.parse({"model": "tiny", "prompt": "Hi", **fields}))


def text(**fields: Any) -> str:
    found = wanted(**fields)
    assert found is not None
    return found.write()


@pytest.mark.parametrize(
    ("fields", "param", "grammar"),
    [
        ({"guided_regex": "a+"}, "guided_regex", of_regex("a+")),
        ({"guided_choice": ["a", "b"]}, "guided_choice", of_choices(["a", "b"])),
        ({"guided_grammar": 'start: "a"'}, "guided_grammar", of_ebnf('start: "a"')),
        ({"guided_json": SCHEMA}, "guided_json", of_json_schema(SCHEMA, {})),
        ({"guided_json": json.dumps(SCHEMA)}, "guided_json", of_json_schema(SCHEMA, {})),
        ({"structured_outputs": {"regex": "a+"}}, "structured_outputs.regex", of_regex("a+")),
        ({"structured_outputs": {"choice": ["a"]}}, "structured_outputs.choice", of_choices(["a"])),
        (
            {"structured_outputs": {"grammar": 'root ::= "a"'}},
            "structured_outputs.grammar",
            of_ebnf('root ::= "a"'),
        ),
        (
            {"structured_outputs": {"json": SCHEMA, "regex": None}},
            "structured_outputs.json",
            of_json_schema(SCHEMA, {}),
        ),
        (
            {"structured_outputs": {"json_object": True}},
            "structured_outputs.json_object",
            of_json_schema({"type": "object"}, {}),
        ),
        (
            {"response_format": {"type": "json_object"}},
            "response_format",
            of_json_schema({"type": "object"}, {}),
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {**NAMED, "strict": True}}},
            "response_format",
            of_json_schema(SCHEMA, {}),
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": NAMED}},
            "response_format",
            of_json_schema(SCHEMA, {"lenient": True}),
        ),
    ],
)
def test_every_name_is_known(fields: dict[str, Any], param: str, grammar: str) -> None:
    found = wanted(**fields)
    assert found is not None
    assert found.param == param
    assert found.write() == grammar


@pytest.mark.parametrize(
    "fields", [{}, {"response_format": {"type": "text"}}, {"response_format": None}]
)
def test_what_asks_for_nothing_leaves_outputs_free(fields: dict[str, Any]) -> None:
    assert wanted(**fields) is None


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"guided_regex": "a", "guided_json": {}}, ["guided_json", "guided_regex"]),
        (
            {"response_format": {"type": "json_object"}, "guided_choice": ["a"]},
            ["response_format", "guided_choice"],
        ),
        (
            {"structured_outputs": {"regex": "a", "choice": ["a"]}},
            ["structured_outputs.regex", "structured_outputs.choice"],
        ),
        (
            {"structured_outputs": {"json": {}}, "guided_grammar": "start: a"},
            ["structured_outputs.json", "guided_grammar"],
        ),
    ],
)
def test_two_at_a_time_are_refused_by_both_names(fields: dict[str, Any], names: list[str]) -> None:
    with pytest.raises(BadRequest) as refused:
        wanted(**fields)
    assert all(repr(name) in refused.value.message for name in names)
    assert refused.value.param == names[1]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"json_object": False}}, "structured_outputs"),
        ({"structured_outputs": {"disable_any_whitespace": True}}, "structured_outputs"),
        (
            {"structured_outputs": {"regex": "a", "whitespace_pattern": " "}},
            "structured_outputs",
        ),
        ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern"),
        ({"guided_regex": "a", "guided_whitespace_pattern": " "}, "guided_whitespace_pattern"),
    ],
)
def test_what_would_do_nothing_is_refused(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as refused:
        wanted(**fields)
    assert refused.value.param == param


def test_whitespace_is_as_asked() -> None:
    def options(**fields: Any) -> dict[str, Any]:
        (part,) = json.loads(text(**fields))["grammars"]
        found = part["json_schema"]["x-guidance"]
        assert isinstance(found, dict)
        return found

    assert options(guided_json={})["whitespace_pattern"] == WHITESPACE
    asked: dict[str, Any] = {"json": {}, "whitespace_pattern": "[ ]?"}
    assert options(structured_outputs=asked)["whitespace_pattern"] == "[ ]?"
    asked = {"json_object": True, "disable_any_whitespace": True}
    assert options(structured_outputs=asked)["whitespace_flexible"] is False
    guided = options(guided_json={}, guided_whitespace_pattern=" ")
    assert guided["whitespace_pattern"] == " "
