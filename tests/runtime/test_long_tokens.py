"""A token that is too long for grammars never comes under one; all others come as if it were not
there, and keep their ids."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtime.grammar import (
    Grammar,
    GrammarError,
    UnusableTokenizer,
    Vocabulary,
    of_choices,
    of_ebnf,
    of_json_schema,
    of_regex,
)
from runtime.long_tokens import MAX_NBYTES, shortened
from tests.router.model_folder import byte_fallback_tokenizer, byte_level_tokenizer

File = dict[str, Any]
LONG = "ab" * MAX_NBYTES
END = 1


def byte_level() -> File:
    return json.loads(byte_level_tokenizer().to_str())  # type: ignore[no-any-return]


def byte_fallback() -> File:
    return json.loads(byte_fallback_tokenizer().to_str())  # type: ignore[no-any-return]


def add(file: File, name: str, *, special: bool = False) -> int:
    """A token that stands for itself in any text."""
    vocab = file["model"]["vocab"]
    token_id: int = max([*vocab.values(), *(entry["id"] for entry in file["added_tokens"])]) + 1
    entry = {**file["added_tokens"][0], "id": token_id, "content": name, "special": special}
    file["added_tokens"].append(entry)
    return token_id


def learn(file: File, as_text: bool) -> dict[int, int]:
    """ "ab" over and over, as tokens each of which two of the one before become. By length."""
    model = file["model"]
    ids = {}
    for length in (2**power for power in range(1, 14)):
        half, name = ("ab" * length)[: length // 2], ("ab" * length)[:length]
        pair = ["a", "b"] if length == 2 else [half, half]
        ids[length] = model["vocab"].setdefault(name, len(model["vocab"]))
        model["merges"].append(pair)
    if as_text:
        model["merges"] = [" ".join(pair) for pair in model["merges"]]
    return ids


def vocabulary_of(file: File, folder: Path, size: int, end: int = END) -> Vocabulary:
    (folder / "tokenizer.json").write_text(json.dumps(file))
    return Vocabulary.from_folder(folder, size, [end])


def may_come(grammar: Grammar) -> set[int]:
    words = np.empty(grammar.vocabulary.row_size, dtype=np.int32)
    grammar.fill(words)
    return set(np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist())


def same_walk(one: Grammar, other: Grammar, seed: int) -> None:
    chooser = random.Random(seed)
    for _ in range(300):
        options = may_come(one)
        assert options == may_come(other)
        token_id = chooser.choice(sorted(options))
        if token_id in one.vocabulary.end_token_ids:
            return
        one.advance([token_id])
        other.advance([token_id])


GRAMMARS = [
    of_regex(f"({LONG[:40]})*[a-c]{{0,9}}"),
    of_choices([LONG + "c", "\uffff" + LONG[:1100]]),
    of_json_schema({"enum": [LONG, "<|im_start|"]}, {}),
    of_ebnf('root ::= "a" root "b" | [^c]'),
]


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
@pytest.mark.parametrize("special", [False, True])
def test_all_others_come_as_if_it_were_not_there(
    tmp_path: Path, make: Callable[[], File], special: bool
) -> None:
    with_it, without = make(), make()
    long_id, after_id = add(with_it, LONG, special=special), add(with_it, "bab")
    assert add(without, "nothing", special=True) == long_id
    assert add(without, "bab") == after_id
    vocabularies = [vocabulary_of(file, tmp_path, 400) for file in (with_it, without)]
    assert not vocabularies[0].is_special(long_id)
    for seed, grammar in enumerate(GRAMMARS):
        one, other = (vocabulary.compile(grammar) for vocabulary in vocabularies)
        same_walk(one, other, seed)
    assert after_id in may_come(vocabularies[0].compile(of_regex("(ba)+b")))


@pytest.mark.parametrize("as_text", [False, True])
def test_one_that_is_learned_is_left_out_with_what_leads_to_it(
    tmp_path: Path, as_text: bool
) -> None:
    file = byte_level()
    ids = learn(file, as_text)
    vocabulary = vocabulary_of(file, tmp_path, 400)
    grammar = vocabulary.compile(of_choices(["ab" * MAX_NBYTES]))
    for _ in range(2):
        assert may_come(grammar) == {ids[MAX_NBYTES]}
        grammar.advance([ids[MAX_NBYTES]])
    assert grammar.may_end
    too_long = {ids[length] for length in ids if length > MAX_NBYTES}
    assert may_come(vocabulary.compile(of_regex("(ab)*"))) >= set(ids.values()) - too_long
    assert not too_long & may_come(vocabulary.compile(of_regex("(ab)*")))


def test_it_never_comes_even_if_its_id_is_asked_for(tmp_path: Path) -> None:
    file = byte_level()
    long_id, after_id = add(file, LONG), add(file, "after")
    vocabulary = vocabulary_of(file, tmp_path, 400)
    assert may_come(vocabulary.compile(f"start: <[{long_id}-{after_id}]>")) == {after_id}
    assert may_come(vocabulary.compile(f"start: <[{long_id}]>")) == set()
    with pytest.raises(GrammarError, match="unknown special"):
        vocabulary.compile(f"start: <|{LONG}|>")


def test_one_that_ends_outputs_ends_them(tmp_path: Path) -> None:
    file = byte_level()
    long_id = add(file, LONG, special=True)
    grammar = vocabulary_of(file, tmp_path, 400, end=long_id).compile(of_regex("a?"))
    assert long_id in may_come(grammar)


@pytest.mark.parametrize(
    ("make", "name", "special", "fits"),
    [
        (byte_level, "a" * 1024, False, True),
        (byte_level, "a" * 1025, False, False),
        (byte_level, "é" * 513, False, False),
        (byte_level, "a" * 1023, True, True),
        (byte_level, "a" * 1024, True, False),
        (byte_fallback, "▁" * 1024, False, True),
        (byte_fallback, "▁" * 1025, False, False),
        (byte_fallback, "🌍" * 257, False, False),
    ],
)
def test_no_shorter_one_is_left_out(
    tmp_path: Path, make: Callable[[], File], name: str, special: bool, fits: bool
) -> None:
    file = make()
    long_id = add(file, name, special=special)
    short = shortened(json.dumps(file, indent=1, ensure_ascii=False))
    assert (short is None) == fits
    assert short is None or short.left_out == {long_id}
    vocabulary_of(file, tmp_path, 400)


def test_a_byte_of_a_learned_one_is_a_character_of_its_name(tmp_path: Path) -> None:
    file = byte_level()
    file["model"]["vocab"]["Ā" * 1024] = long_id = len(file["model"]["vocab"])
    vocabulary = vocabulary_of(file, tmp_path, 400)
    assert long_id in may_come(vocabulary.compile(of_regex("\\x00{0,3000}")))


def test_a_panic_while_it_is_built_leaves_the_process_alive(tmp_path: Path) -> None:
    with pytest.raises(UnusableTokenizer, match="failed"):
        vocabulary_of(byte_level(), tmp_path, 3_000_000)
    file = byte_fallback()
    file["model"]["vocab"]["<0xZZ>"] = len(file["model"]["vocab"])
    with pytest.raises(UnusableTokenizer, match="failed"):
        vocabulary_of(file, tmp_path, 400)


@pytest.mark.parametrize(
    "text", ["[" + "1" * 999 + "]", '{"model": 3, "x": "%s"}' % ("y" * 999), "x" * 999]
)
def test_what_is_no_tokenizer_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(UnusableTokenizer):
        Vocabulary.from_folder(tmp_path, 400)
