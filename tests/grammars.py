"""Grammars of every kind for the tests, and the foreign judge of each."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jsonschema

from runtime.grammar import of_choices, of_ebnf, of_json_schema, of_regex

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 4},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["relay", "baton"]}, "maxItems": 2},
        "next": {"anyOf": [{"type": "null"}, {"type": "boolean"}]},
    },
    "required": ["name", "age", "tags", "next"],
    "additionalProperties": False,
}
CHOICES = ["Paris", "Berlin 🌍", "東京"]
REGEX = r"[a-z]{1,3}-[0-9]{2}"
EBNF = 'root ::= "(" ("a" | "b" root)? ")"'


@dataclass(frozen=True)
class Form:
    """One form of output, told in every language that concerns it."""

    name: str
    grammar: str
    """As the control plane carries it."""
    fields: dict[str, Any]
    """As a client asks for it."""
    check: Callable[[str], object]
    """Raises for a text that does not fit."""
    is_bounded: bool = True
    """Every output ends by itself within a hundred tokens or so."""


def _fits_schema(text: str) -> None:
    jsonschema.validate(json.loads(text), SCHEMA)


def _is_object(text: str) -> None:
    assert isinstance(json.loads(text), dict), text


def _is_choice(text: str) -> None:
    assert text in CHOICES, text


def _matches(text: str) -> None:
    assert re.fullmatch(REGEX, text), text


def _nests(text: str) -> None:
    before = ""
    while text != before:
        before, text = text, re.sub(r"\((a|bX)?\)", "X", text)
    assert text == "X", before


def _response_format(name: str, **more: object) -> dict[str, Any]:
    return {"response_format": {"type": name, **more}}


FORMS = [
    Form(
        "json_schema",
        of_json_schema(SCHEMA, {"whitespace_pattern": " "}),
        {"structured_outputs": {"json": SCHEMA, "whitespace_pattern": " "}},
        _fits_schema,
    ),
    Form(
        "json_object",
        of_json_schema({"type": "object"}, {}),
        _response_format("json_object"),
        _is_object,
        is_bounded=False,
    ),
    Form("regex", of_regex(REGEX), {"guided_regex": REGEX}, _matches),
    Form("choice", of_choices(CHOICES), {"structured_outputs": {"choice": CHOICES}}, _is_choice),
    Form("ebnf", of_ebnf(EBNF), {"guided_grammar": EBNF}, _nests, is_bounded=False),
]
