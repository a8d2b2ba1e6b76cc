"""Grammars by themselves: whatever a random writer does within one fits what was asked for."""

import json
import random
import re
from collections.abc import Callable, Iterable
from pathlib import Path

import jsonschema
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from runtime.grammar import (
    MAX_GRAMMAR_NBYTES,
    Grammar,
    GrammarError,
    UnusableTokenizer,
    Vocabulary,
    of_choices,
    of_ebnf,
    of_json_schema,
    of_regex,
)
from tests.router.model_folder import byte_fallback_tokenizer

END = 1  # <|im_end|>
MAX_STEPS = 20_000
Decode = Callable[[Iterable[int]], str]


@pytest.fixture(scope="module")
def decode(folder: Path) -> Decode:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return lambda token_ids: tokenizer.decode(list(token_ids))


def may_come(grammar: Grammar) -> list[int]:
    words = np.empty(grammar.vocabulary.row_size, dtype=np.int32)
    grammar.fill(words)
    return np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist()


def random_walk(grammar: Grammar, seed: int) -> list[int]:
    """A whole output, without the token that ends it; that it may come exactly where the grammar
    says is checked on the way."""
    chooser = random.Random(seed)
    token_ids: list[int] = []
    for _ in range(MAX_STEPS):
        options = may_come(grammar)
        assert max(options) < 333
        assert (END in options) == grammar.may_end
        token_id = chooser.choice(options)
        if token_id == END:
            return token_ids
        token_ids.append(token_id)
        grammar.advance([token_id])
    raise AssertionError("it goes on for ever")


def schemas(depth: int = 2) -> st.SearchStrategy[dict[str, object]]:
    """Schemas whose values are bounded, so that every random walk comes to an end."""
    names = st.text('abc é"\\', min_size=1, max_size=3)
    leaves = st.one_of(
        st.just({"type": "boolean"}),
        st.just({"type": "null"}),
        st.integers(-300, 300).map(
            lambda low: {"type": "integer", "minimum": low, "maximum": low + 150}
        ),
        st.integers(0, 3).map(lambda n: {"type": "string", "minLength": n, "maxLength": n + 3}),
        st.just({"type": "string", "pattern": "^[a-c]{2}(x|yy)$"}),
        st.lists(names, min_size=1, max_size=4).map(lambda values: {"enum": values}),
        st.just({"const": {"a": [1, None]}}),
    )
    if depth == 0:
        return leaves
    inner = schemas(depth - 1)
    objects = st.dictionaries(names, inner, max_size=3).flatmap(
        lambda properties: st.sets(st.sampled_from(sorted(properties) or [""])).map(
            lambda required: {
                "type": "object",
                "properties": properties,
                "required": sorted(required & set(properties)),
                "additionalProperties": False,
            }
        )
    )
    arrays = inner.map(lambda items: {"type": "array", "items": items, "maxItems": 3})
    either = st.lists(inner, min_size=1, max_size=2).map(lambda options: {"anyOf": options})
    return st.one_of(leaves, objects, arrays, either)


@settings(max_examples=60, deadline=None)
@given(schema=schemas(), seed=st.integers(0, 1 << 30))
def test_what_a_random_writer_says_under_a_schema_is_valid(
    vocabulary: Vocabulary, decode: Decode, schema: dict[str, object], seed: int
) -> None:
    grammar = vocabulary.compile(of_json_schema(schema, {"whitespace_pattern": " {1,2}"}))
    text = decode(random_walk(grammar, seed))
    jsonschema.validate(json.loads(text), schema)


@settings(max_examples=30, deadline=None)
@given(schema=schemas(), seed=st.integers(0, 1 << 30))
def test_a_state_rebuilt_from_tokens_is_the_one_that_took_them_one_by_one(
    vocabulary: Vocabulary, schema: dict[str, object], seed: int
) -> None:
    text = of_json_schema(schema, {"whitespace_pattern": " {1,2}"})
    token_ids = random_walk(vocabulary.compile(text), seed)[:40]
    advanced = vocabulary.compile(text)
    for length in range(len(token_ids) + 1):
        rebuilt = vocabulary.compile(text)
        rebuilt.advance(token_ids[:length])
        assert may_come(rebuilt) == may_come(advanced)
        assert rebuilt.may_end == advanced.may_end
        advanced.advance(token_ids[length : length + 1])


@settings(max_examples=40, deadline=None)
@example(choices=['\x7f\x00"\\'], seed=0)
@given(choices=st.lists(st.text(max_size=6), min_size=1, max_size=5), seed=st.integers(0, 99))
def test_a_choice_is_one_of_the_choices(
    vocabulary: Vocabulary, decode: Decode, choices: list[str], seed: int
) -> None:
    grammar = vocabulary.compile(of_choices(choices))
    assert decode(random_walk(grammar, seed)) in choices


@pytest.mark.parametrize("seed", range(10))
def test_a_regex_is_matched_as_a_whole(vocabulary: Vocabulary, decode: Decode, seed: int) -> None:
    pattern = r"(ca|é|[^a-z]){1,4}-[0-9]{2}( 🌍)?"
    text = decode(random_walk(vocabulary.compile(of_regex(pattern)), seed))
    assert re.fullmatch(pattern, text), text


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize(
    "grammar",
    [
        'root ::= "(" root ")" | [0-9] | "x" ("+" [0-9])*',
        'start: "(" start ")" | /[0-9]/ | "x" ("+" /[0-9]/)*',
    ],
    ids=["gbnf", "lark"],
)
def test_ebnf_in_both_spellings_nests(
    vocabulary: Vocabulary, decode: Decode, grammar: str, seed: int
) -> None:
    text = decode(random_walk(vocabulary.compile(of_ebnf(grammar)), seed))
    depth = len(text) - len(text.lstrip("("))
    assert re.fullmatch(rf"\({{{depth}}}([0-9]|x(\+[0-9])*)\){{{depth}}}", text), text


def test_spaces_between_jsons_parts_come_to_an_end(vocabulary: Vocabulary) -> None:
    grammar = vocabulary.compile(of_json_schema({"type": "object"}, {}))
    grammar.advance(grammar_tokens(vocabulary, "{" + 64 * " "))
    (space,) = grammar_tokens(vocabulary, " ")
    assert space not in may_come(grammar)


def grammar_tokens(vocabulary: Vocabulary, text: str) -> list[int]:
    """One token for each of these ASCII characters."""
    by_char = {}
    for char in set(text):
        options = may_come(vocabulary.compile(of_choices([char])))
        by_char[char] = next(id for id in options if id != END)
    return [by_char[char] for char in text]


@pytest.mark.parametrize(
    ("write", "reason"),
    [
        (lambda: of_regex("(a"), "unclosed group"),
        (lambda: of_regex("a(?!b)"), "look-ahead"),
        (lambda: of_regex(r"(a)\1"), "backreferences"),
        (lambda: of_json_schema({"type": "strin"}, {}), "strin"),
        (lambda: of_json_schema({"not": {"type": "null"}}, {}), "not"),
        (lambda: of_json_schema(False, {}), "neither an object nor true"),
        (lambda: of_json_schema({"maximum": 10**400}, {}), "JSON"),
        (lambda: of_ebnf("start: missing"), "missing"),
        (lambda: of_ebnf('root ::= "a" ('), "Expected"),
        (lambda: of_ebnf("root ::= " + "(" * 2000), "too deeply"),
        (lambda: of_regex("a" * (MAX_GRAMMAR_NBYTES + 1)), "longer"),
    ],
)
def test_what_cannot_be_compiled_says_why(
    vocabulary: Vocabulary, write: Callable[[], str], reason: str
) -> None:
    with pytest.raises(GrammarError, match=reason):
        vocabulary.compile(write())


def test_the_limits_stop_a_bomb_at_once(vocabulary: Vocabulary) -> None:
    grammar = vocabulary.compile(of_regex("b(a{1000}){1000}"))
    with pytest.raises(GrammarError, match="too many"):
        random_walk(grammar, seed=0)


def test_a_token_that_does_not_fit_is_refused(vocabulary: Vocabulary) -> None:
    grammar = vocabulary.compile(of_choices(["a"]))
    with pytest.raises(GrammarError, match="does not fit"):
        grammar.advance([0])


def test_a_token_that_would_make_it_whole_is_known_without_taking_it(
    vocabulary: Vocabulary,
) -> None:
    a, b = grammar_tokens(vocabulary, "ab")
    grammar = vocabulary.compile(of_regex("ab+"))
    assert not grammar.would_end(a)
    assert not grammar.would_end(b)
    grammar.advance([a])
    before = may_come(grammar)
    assert grammar.would_end(b)
    assert may_come(grammar) == before


def test_tokens_of_single_bytes_have_their_bytes(tmp_path: Path) -> None:
    tokenizer = byte_fallback_tokenizer()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    vocabulary = Vocabulary.from_folder(tmp_path, tokenizer.get_vocab_size(), [2])
    grammar = vocabulary.compile(of_choices(["é", "b"]))
    spellings = {"<0xC3>", "<0x62>", "b", "é"}
    assert {tokenizer.id_to_token(token_id) for token_id in may_come(grammar)} == spellings


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(UnusableTokenizer):
        Vocabulary.from_folder(tmp_path, 10)
    with pytest.raises(UnusableTokenizer, match="too small"):
        Vocabulary.from_folder(folder, 10)


def test_long_outputs_do_not_use_up_the_limits(vocabulary: Vocabulary) -> None:
    person = {
        "type": "object",
        "properties": {
            "name": {"type": "string"},
            "email": {"type": "string", "format": "email"},
            "day": {"type": "string", "format": "date"},
            "id": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{4,8}(-[a-z]+)*$"},
            "size": {"type": "number", "minimum": 0, "maximum": 1000},
        },
        "additionalProperties": False,
        "required": ["name", "email", "day", "id", "size"],
    }
    schema = {"type": "array", "items": person, "minItems": 1000}
    grammar = vocabulary.compile(of_json_schema(schema, {"whitespace_pattern": " "}))
    chooser = random.Random(1)
    for _ in range(8000):
        grammar.advance([chooser.choice(may_come(grammar))])
