"""One sample under a grammar: which tokens may come next, by the tokens it has.

Rebuilt from output tokens alone, wherever the sample comes to life: on another worker, behind a
transfer, after a preemption. Where the sample may end is decided here too:

* an end id of the model may come exactly where the grammar may end, and is all that may come where
  it must; `ignore_eos` keeps it away as long as anything else may come
* a stop token id ends the sample, so it may come only where the grammar is whole: with its text,
  or before it if it stands for no text

Belongs to one thread at a time: first the one that compiles, then the one that fills masks.
"""

from collections.abc import Iterable, Sequence
from typing import Self

import numpy as np

from engine.logit_rules import Words
from engine.request import SamplingParams
from runtime.grammar import Grammar, GrammarError

_ALL = np.int32(-1)


class SampleGrammar:
    """See the module."""

    __slots__ = ("_ends", "_grammar", "_ignore_eos", "_stops", "failure", "num_taken")

    def __init__(self, grammar: Grammar, params: SamplingParams) -> None:
        """`grammar` at its start; it is the sample's own from now on."""
        self.failure: str | None = None
        """Why the sample cannot go on."""
        self.num_taken = 0
        """Output tokens that the grammar has taken."""
        self._grammar = grammar
        self._ends = grammar.vocabulary.end_token_ids
        self._stops = params.stop_token_ids - self._ends
        self._ignore_eos = params.ignore_eos

    @classmethod
    def rebuilt(
        cls, grammar: Grammar, params: SamplingParams, output_token_ids: Sequence[int]
    ) -> Self:
        """After these outputs. Raises GrammarError if they do not fit."""
        sample = cls(grammar, params)
        sample._take(output_token_ids)
        return sample

    def fill(self, new_token_ids: Sequence[int], words: Words) -> None:
        """Takes the outputs behind `num_taken`, and sets what may come next. Sets `failure`, and
        everything in `words`, if nothing may."""
        try:
            self._take(new_token_ids)
            self._grammar.fill(words)
        except GrammarError as error:
            self._fail(str(error), words)
            return
        if self._stops:
            self._judge_stops(words)
        if self._ignore_eos:
            without = words.copy()
            _clear(without, self._ends)
            if without.any():
                words[:] = without
        if not words.any():
            self._fail("no token may come next", words)

    def _take(self, token_ids: Sequence[int]) -> None:
        self._grammar.advance(token_ids)
        self.num_taken += len(token_ids)

    def _judge_stops(self, words: Words) -> None:
        for token_id in self._stops:
            if self._grammar.vocabulary.is_special(token_id):
                may_come = self._grammar.may_end
            else:
                may_come = _has(words, token_id) and self._grammar.would_end(token_id)
            (_set if may_come else _clear)(words, (token_id,))

    def _fail(self, reason: str, words: Words) -> None:
        self.failure = f"the grammar cannot go on after {self.num_taken} tokens: {reason}"
        words.fill(_ALL)


def _has(words: Words, token_id: int) -> bool:
    return bool(words.view(np.uint32)[token_id // 32] >> (token_id % 32) & 1)


def _set(words: Words, token_ids: Iterable[int]) -> None:
    bits = words.view(np.uint32)
    for token_id in token_ids:
        bits[token_id // 32] |= np.uint32(1 << token_id % 32)


def _clear(words: Words, token_ids: Iterable[int]) -> None:
    bits = words.view(np.uint32)
    for token_id in token_ids:
        bits[token_id // 32] &= np.uint32(0xFFFFFFFF ^ (1 << token_id % 32))
