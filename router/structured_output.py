"""What a request may ask of the form of its outputs, under OpenAI's and vLLM's names.

OpenAI's `response_format`; vLLM's `structured_outputs`, and its older `guided_*`. A request has one
of them at most. What it asks becomes the text of a grammar (runtime/grammar.py); whether that
compiles is router/grammar_check.py's matter.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from router.errors import BadRequest
from router.grammar_bounds import check_choices, check_ebnf, check_lark, check_regex, check_schema
from runtime.grammar import GrammarError, of_choices, of_ebnf, of_json_schema, of_regex

Schema = dict[str, object] | bool | str
"""A string holds JSON, as vLLM allows it."""
Choices = Annotated[list[str], Field(min_length=1)]
ANY_OBJECT: Mapping[str, object] = {"type": "object"}


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")


class TextFormat(_Strict):
    type: Literal["text"]


class JSONObjectFormat(_Strict):
    type: Literal["json_object"]


class NamedSchema(_Strict):
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    description: str | None = None  # for the model's eyes at OpenAI; no template has a place for it
    schema_: Annotated[dict[str, object], Field(alias="schema")]
    strict: bool | None = None


class JSONSchemaFormat(_Strict):
    type: Literal["json_schema"]
    json_schema: NamedSchema


ResponseFormat = Annotated[
    TextFormat | JSONObjectFormat | JSONSchemaFormat, Field(discriminator="type")
]


class StructuredOutputs(_Strict):
    """vLLM's `StructuredOutputsParams`; its other fields belong to other backends."""

    json_: Annotated[Schema | None, Field(alias="json")] = None
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    whitespace_pattern: str | None = None


class StructuredOutputFields(BaseModel):
    """The fields of a request body."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None


@dataclass(frozen=True, slots=True)
class Wanted:
    """One grammar that a request asks for."""

    param: str
    write: Callable[[], str]
    """The text of the grammar. Takes time for a long one; raises GrammarError."""


def wanted_grammar(body: StructuredOutputFields) -> Wanted | None:
    """None: outputs are free. Raises BadRequest, naming both, if the request asks twice."""
    wanted = [*_of_response_format(body), *_of_structured_outputs(body), *_of_guided(body)]
    if len(wanted) > 1:
        first, second = wanted[0].param, wanted[1].param
        raise BadRequest(f"Send either {first!r} or {second!r}: one form at a time.", param=second)
    if wanted:
        return wanted[0]
    if body.structured_outputs is not None:
        raise BadRequest(
            "'structured_outputs' needs one of json, regex, choice, grammar and json_object.",
            param="structured_outputs",
        )
    return None


def _of_response_format(body: StructuredOutputFields) -> Iterator[Wanted]:
    match body.response_format:
        case JSONObjectFormat():
            yield Wanted("response_format", partial(_json, ANY_OBJECT, {}))
        case JSONSchemaFormat(json_schema=named):
            # Best effort unless strict, says OpenAI: keywords that no grammar can hold are passed
            # over then, and refused by name otherwise.
            options: dict[str, object] = {"lenient": not named.strict}
            yield Wanted("response_format", partial(_json, named.schema_, options))


def _of_structured_outputs(body: StructuredOutputFields) -> Iterator[Wanted]:
    asked = body.structured_outputs
    if asked is None:
        return
    options = _whitespace(asked.whitespace_pattern)
    if asked.disable_any_whitespace:
        options = {"whitespace_flexible": False, "whitespace_pattern": None}
    is_json = asked.json_ is not None or asked.json_object
    if options and not is_json:
        raise BadRequest(
            "Whitespace in 'structured_outputs' can only be told with json or json_object.",
            param="structured_outputs",
        )
    if asked.json_ is not None:
        yield Wanted("structured_outputs.json", partial(_json, asked.json_, options))
    if asked.json_object:
        yield Wanted("structured_outputs.json_object", partial(_json, ANY_OBJECT, options))
    yield from _others("structured_outputs.", asked.regex, asked.choice, asked.grammar)


def _of_guided(body: StructuredOutputFields) -> Iterator[Wanted]:
    if body.guided_json is not None:
        options = _whitespace(body.guided_whitespace_pattern)
        yield Wanted("guided_json", partial(_json, body.guided_json, options))
    elif body.guided_whitespace_pattern is not None:
        raise BadRequest(
            "'guided_whitespace_pattern' needs 'guided_json'.", param="guided_whitespace_pattern"
        )
    yield from _others("guided_", body.guided_regex, body.guided_choice, body.guided_grammar)


def _others(
    prefix: str, regex: str | None, choices: list[str] | None, ebnf: str | None
) -> Iterator[Wanted]:
    if regex is not None:
        yield Wanted(f"{prefix}regex", partial(_regex, regex))
    if choices is not None:
        yield Wanted(f"{prefix}choice", partial(_choices, choices))
    if ebnf is not None:
        yield Wanted(f"{prefix}grammar", partial(_ebnf, ebnf))


def _whitespace(pattern: str | None) -> dict[str, object]:
    return {} if pattern is None else {"whitespace_pattern": pattern}


def _json(schema: Schema | Mapping[str, object], options: dict[str, object]) -> str:
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise GrammarError(f"the schema is not JSON: {error}") from error
    check_schema(schema)
    pattern = options.get("whitespace_pattern")
    if isinstance(pattern, str):
        check_regex(pattern)
    return of_json_schema(schema, options)


def _regex(pattern: str) -> str:
    check_regex(pattern)
    return of_regex(pattern)


def _choices(choices: list[str]) -> str:
    check_choices(choices)
    return of_choices(choices)


def _ebnf(text: str) -> str:
    check_ebnf(text)
    lark = of_ebnf(text)
    check_lark(lark)
    return lark
