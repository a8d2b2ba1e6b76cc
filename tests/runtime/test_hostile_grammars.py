"""What a library written for friends does with hostile grammars ends, and ends nobody's thread."""

from pathlib import Path
from typing import cast

import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer

from runtime.grammar import Grammar, GrammarError, Vocabulary, composed, of_choices, of_ebnf
from tests.router.bombs import NO_BOMBS

END = 1


def may_come(grammar: Grammar) -> set[int]:
    words = np.empty(grammar.vocabulary.row_size, dtype=np.int32)
    grammar.fill(words)
    return set(np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist())


@pytest.mark.parametrize(
    "endless",
    [
        'root ::= x root\nx ::= "a"*',
        'start: T* r\nr: r "b"\nT: "a"+',
        '%llguidance {"no_forcing": false}\nstart: T start\nT: "a"+',
        'start: %lark {\nstart: T start\nT: "a"+\n%llguidance {"no_forcing": false}\n} // }',
    ],
)
def test_where_one_byte_may_come_for_ever_nobody_goes_ahead(
    vocabulary: Vocabulary, endless: str
) -> None:
    known = vocabulary.compile(of_ebnf('root ::= "The capital"'))
    assert len(may_come(known)) > 1, "it goes ahead: what follows here would take for ever"
    (a,) = may_come(vocabulary.compile(of_choices(["a"]))) - {END}
    for text in (of_ebnf(endless), composed("start: @x", {"x": of_ebnf(endless)})):
        grammar = vocabulary.compile(text)
        for _ in range(100):
            assert a in may_come(grammar)
            grammar.advance([a])


@pytest.mark.parametrize("text", NO_BOMBS)
def test_an_output_without_measure_is_held_token_by_token(
    vocabulary: Vocabulary, text: str
) -> None:
    """To the library's limits, which count what a step costs."""
    grammar = vocabulary.compile(of_ebnf(text))
    for _ in range(500):
        (only,) = may_come(grammar)
        grammar.advance([only])


def test_a_panic_of_the_library_is_an_error_like_any_other(
    vocabulary: Vocabulary, folder: Path
) -> None:
    with pytest.raises(GrammarError, match=r"the library failed: assertion [^\n]*$"):
        vocabulary.compile('start: a "x"\na[stop="e"]:').fill(np.empty(11, dtype=np.int32))
    with pytest.raises(BaseException, match="assertion") as panic:
        LLTokenizer(str(folder / "tokenizer.json"), n_vocab=3_000_000)

    class Panicking:
        def __getattr__(self, name: str) -> object:
            raise panic.value

    grammar = Grammar(vocabulary, cast(LLMatcher, Panicking()))
    for use in (
        lambda: grammar.advance([5]),
        lambda: grammar.would_end(5),
        lambda: grammar.fill(np.empty(11, dtype=np.int32)),
    ):
        with pytest.raises(GrammarError, match="the library failed"):
            use()
