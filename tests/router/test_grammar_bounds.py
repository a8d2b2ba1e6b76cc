"""What is too much is known by its looks; what people write is let through."""

from typing import Any

import pytest

from router.grammar_bounds import check_choices, check_ebnf, check_lark, check_regex, check_schema
from runtime.grammar import GrammarError


@pytest.mark.parametrize(
    "pattern",
    [
        "",
        "a{100}",
        "(a{100}){100}",
        "a{5000}|b{5000}",
        "(a{100})(b{100})(c{100})",
        r"\(a{9}\){9}",
        "[a{99}]{100}",
        "[]({999}]{100}",
        "[^]){999}]{100}",
        r"[\]{999}]{100}",
        "(a{100}|b){99}",
        "a{,20}b{3,}",
        "{",
        "a{x}",
        "((",
        "))a{9}",
        "\\",
        "[",
    ],
)
def test_patterns_of_people(pattern: str) -> None:
    check_regex(pattern)


@pytest.mark.parametrize(
    "pattern",
    [
        "a{10001}",
        "a{99999999999999999999}",
        "(a{101}){100}",
        "((a{30}){30}){30}",
        "(x|(a{1000})?b){11}",
        "(a{1000}b)+{11}",
        "a{100}{101}",
        r"(\)a{1000}){11}",
        "([)]a{1000}){11}",
        "(?:a{1,1000}){1,11}",
    ],
)
def test_patterns_that_repeat_too_much(pattern: str) -> None:
    with pytest.raises(GrammarError, match="10000"):
        check_regex(pattern)


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {},
        {"multipleOf": 0.01, "maximum": 10**30},
        {"properties": {f"p{i}": {"multipleOf": 0.01} for i in range(900)}},
        {"properties": {f"p{i}": {"multipleOf": 1000} for i in range(900)}},
        {"allOf": [{"multipleOf": 97}, {"multipleOf": 89}]},
        {"properties": {"multipleOf": {"type": "string"}, "pattern": {"const": "a{99999}"}}},
        {"pattern": "a{100}", "patternProperties": {"^x{100}$": {}}},
        {"multipleOf": 0},
        {"multipleOf": float("nan")},
        {"multipleOf": float("inf")},
        {"multipleOf": True},
    ],
)
def test_schemas_of_people(schema: Any) -> None:
    check_schema(schema)


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"multipleOf": 10_007}, "multipleOf"),
        ({"multipleOf": 0.000010007}, "multipleOf"),
        ({"multipleOf": 10_007.0}, "multipleOf"),
        ({"allOf": [{"multipleOf": 101}, {"multipleOf": 103}]}, "multipleOf"),
        ({"anyOf": [{"multipleOf": 9973}] * 3}, "multipleOf"),
        ({"properties": {f"p{i}": {} for i in range(1001)}}, "1000 properties"),
        ([{"properties": {f"p{i}": {} for i in range(999)}}] * 3, "2000 in all"),
        ({"x": {"pattern": "a{10001}"}}, "repeats"),
        ({"patternProperties": {"a{10001}": {}}}, "repeats"),
        ({"enum": ["a" * 150_000]}, "longer"),
        ({"a" * 150_000: 1}, "longer"),
        ({"enum": [None] * 50_000}, "longer"),
    ],
)
def test_schemas_that_ask_too_much(schema: Any, reason: str) -> None:
    with pytest.raises(GrammarError, match=reason):
        check_schema(schema)


def test_depth_is_found_without_recursion() -> None:
    deep: Any = {}
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(GrammarError, match="deep"):
        check_schema(deep)
    while deep:
        (deep,) = deep  # or its end would be recursive


def test_choices() -> None:
    check_choices(["a"] * 4096)
    with pytest.raises(GrammarError, match="4096"):
        check_choices(["a"] * 4097)
    with pytest.raises(GrammarError, match="characters"):
        check_choices(["a" * 70_000] * 2)


def test_ebnf() -> None:
    rules = "\n".join(f'rule-{i} ::= "a" | rule-{i + 1}' for i in range(250))
    check_ebnf(rules)
    check_ebnf("start: /a{9}/\n" + "\n".join(f'R{i}: "a"' for i in range(250)))
    for many in (rules + rules, "\n".join(f"?r{i}.2: x" for i in range(300))):
        with pytest.raises(GrammarError, match="256 rules"):
            check_ebnf(many)
    with pytest.raises(GrammarError, match="longer"):
        check_ebnf("#" * 40_000)
    for repeated in ("root ::= a{20000}", "start: a~3..20000", "start: a~20000"):
        with pytest.raises(GrammarError, match="repeats"):
            check_ebnf(repeated)


@pytest.mark.parametrize(
    "text",
    [
        'start: "std::vector" /a&b~/ "~" // a & b\n# c & ~d :: e',
        'start: "\\"&" | /\\/&/ | "#&" | a~3 | a ~ 3..5',
        'start: %json {"type": "string", "description": "& \\" ~"} "x"',
        'start: %json\n{"multipleOf": 0.5} | %json {"multipleOf": 97}',
        'start: "a" // %json & so on',
    ],
)
def test_lark_of_people(text: str) -> None:
    check_lark(text)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("start: A\nA: /a/ & /b/", "&"),
        ('start: A\nA: "x" ~/a/', "~"),
        ('start: A\nA: ~ "3"', "~"),
        ('start: a::0\na::_: "x"', "::"),
        ('start: %json {"a": "}"} & "x"', "&"),
        ('start: "%json {" & "}"', "&"),
        ('start: %json {"multipleOf": 10007}', "multipleOf"),
        ('start: %json {"multipleOf": 101} | %json {"multipleOf": 103}', "multipleOf"),
        ('start: %lark {\nstart: %json {"multipleOf": 10007}\n}', "multipleOf"),
        ('start: %json {"pattern": "a{10001}"}', "repeats"),
        ('start: %json // {}\n {"multipleOf": 10007}', "no schema"),
        ("start: %json " + '{"items":' * 5000, "no schema"),
        (' {"grammars": []}', "JSON"),
    ],
)
def test_lark_without_a_bound(text: str, reason: str) -> None:
    with pytest.raises(GrammarError, match=reason):
        check_lark(text)
