"""Small requests that would cost a compiler without limits seconds, gigabytes or its stack."""

from collections.abc import Sequence
from typing import Any

Fields = dict[str, Any]


def _nested(depth: int) -> object:
    schema: object = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


def _doubling(num_rules: int, names: str, define: str, root: str) -> str:
    rules = [f"{names}{i}{define} {names}{i + 1} {names}{i + 1}" for i in range(num_rules)]
    return "\n".join([f"{root}{define} {names}0", *rules, f'{names}{num_rules}{define} "a"'])


def _json(schema: object) -> Fields:
    return {"guided_json": schema}


def _all_of(parts: Sequence[object]) -> Fields:
    return _json({"allOf": parts})


BOMBS: dict[str, Fields] = {
    "deep schema": _json(_nested(180)),
    "deep schema in a string": _json('{"items":' * 20_000 + "{}" + "}" * 20_000),
    "optional properties": _json({"properties": {f"p{i}": {} for i in range(3000)}}),
    "objects of properties": _json(
        {"items": {f"x{j}": {"properties": {f"p{i}": {} for i in range(900)}} for j in range(3)}}
    ),
    "long enum": _json({"enum": [f"value {i}" for i in range(20_000)]}),
    "exponential allOf": _all_of(
        [{"anyOf": [{"properties": {f"p{i}{j}": {}}} for j in range(4)]} for i in range(20)]
    ),
    "self reference": _json({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}),
    "multipleOf": _json({"type": "integer", "multipleOf": 999_983}),
    "multipleOf in common": _all_of([{"type": "integer", "multipleOf": n} for n in (9973, 9967)]),
    "multipleOf again and again": _json(
        {"properties": {f"p{i}": {"type": "integer", "multipleOf": 9973} for i in range(900)}}
    ),
    "repetition in a pattern": _json({"type": "string", "pattern": "((a{100}){100}){100}"}),
    "repetition": {"guided_regex": "(a{1000}){1000}"},
    "repetition five deep": {"guided_regex": "((((a{30}){30}){30}){30}){30}"},
    "repetition behind a prefix": {"structured_outputs": {"regex": "abc(a{999}){999}"}},
    "deep regex": {"guided_regex": "(" * 8000 + "a" + ")" * 8000},
    "stars in stars": {"guided_regex": "(?:" * 1000 + "a" + ")*" * 1000},
    "long regex": {"guided_regex": "|".join(f"w{i}[a-z]*" for i in range(9000))},
    "long whitespace": {
        "structured_outputs": {"json_object": True, "whitespace_pattern": "( {500}){500}"}
    },
    "many choices": {"guided_choice": [f"choice number {i}" for i in range(9000)]},
    "doubling terminals": {"guided_grammar": _doubling(250, "R", ":", "start")},
    "doubling terminals in GBNF": {"guided_grammar": _doubling(250, "r", " ::=", "root")},
    "many rules": {"guided_grammar": _doubling(1500, "r", " ::=", "root")},
    "deep EBNF": {"guided_grammar": "root ::= " + "(" * 3000 + '"a"' + ")" * 3000},
    "deep Lark": {"guided_grammar": "start: " + "(" * 3000 + '"a"' + ")" * 3000},
    "multipleOf within Lark": {"guided_grammar": 'start: %json {"multipleOf": 999983}'},
    "multipleOf again and again within Lark": {
        "guided_grammar": "start: "
        + " ".join(f'%json {{"multipleOf": {n}}}' for n in range(9900, 9999))
    },
    "multipleOf as a grammar of the library's own": {
        "structured_outputs": {
            "grammar": '\n{"grammars": [{"json_schema": {"multipleOf": 999983}}]}'
        }
    },
    "parameters": {"guided_grammar": 'start: a::0\na::_: a::incr([0:64]) "x" | "x"'},
    "complement of complements": {
        "guided_grammar": 'start: T\nT: ~((~("a") ~(/((((?i)k){9,1000}){1,300}|((b)?x?)+)/)))'
    },
    "no output at all": {"guided_grammar": "root ::= root"},
}

NO_BOMBS = [
    _doubling(250, "r", ":", "start"),
    'start: a{1000}\na: b{1000}\nb: c{1000}\nc: "x"{1000}',
]
"""Outputs that fit are long beyond measure, but a token of one costs next to nothing."""
