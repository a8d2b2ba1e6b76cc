"""Masks, bias and penalties: against the plain sampler, and one by one."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.logit_processors import RowRules, process_logits
from engine.logit_rules import LogitRules, pack_words, remove_ids
from engine.request import SamplingParams
from engine.sampler import sample_tokens
from tests.engine.plain_sampler import VOCAB, Sample, plain_scores, random_logits, samples

PLAIN = SamplingParams(max_tokens=100)


@settings(max_examples=300, deadline=None)
@given(batch=st.lists(samples, min_size=1, max_size=6), seed=st.integers(0, 1000))
def test_each_row_is_what_the_plain_sampler_says(batch: list[Sample], seed: int) -> None:
    logits = random_logits(len(batch), seed)
    chosen = sample_tokens(torch.from_numpy(logits), [sample.row() for sample in batch]).tolist()
    for token_id, row, sample in zip(chosen, logits.tolist(), batch, strict=True):
        scores = plain_scores(row, sample)
        assert scores[token_id] >= max(scores) - 1e-4, (token_id, sample)


@settings(max_examples=100, deadline=None)
@given(batch=st.lists(samples, min_size=2, max_size=6), seed=st.integers(0, 1000))
def test_a_row_does_not_depend_on_its_batch(batch: list[Sample], seed: int) -> None:
    logits = torch.from_numpy(random_logits(len(batch), seed))
    rows = [RowRules(sample.row().rules, sample.row().grammar) for sample in batch]
    together = process_logits(logits, rows)
    for index, row in enumerate(rows):
        alone = process_logits(logits[index : index + 1], [row])
        assert torch.equal(together[index], alone[0])


def processed(sample: Sample, logits: list[float] | None = None) -> list[float]:
    values = torch.tensor([logits or [1.0] * VOCAB])
    row = sample.row()
    result: list[float] = process_logits(values, [RowRules(row.rules, row.grammar)])[0].tolist()
    return result


def test_nothing_asked_costs_nothing() -> None:
    assert LogitRules.of(PLAIN, (1, 2), {3}) is None
    logits = torch.randn(2, VOCAB)
    assert process_logits(logits, [RowRules(None, None)] * 2) is logits


def test_logits_are_left_as_they_are() -> None:
    logits = torch.ones(1, VOCAB)
    sample = Sample(replace(PLAIN, logit_bias=((3, 5.0),)))
    assert sample_tokens(logits, [sample.row()]).item() == 3
    assert torch.equal(logits, torch.ones(1, VOCAB))


def test_penalties_count_what_vllms_do() -> None:
    params = replace(PLAIN, repetition_penalty=2.0, frequency_penalty=0.25, presence_penalty=0.5)
    sample = Sample(params, prompt=(0, 1), outputs=(1, 2, 2))
    logits = [4.0, 4.0, -4.0, 4.0] + [0.0] * (VOCAB - 4)
    assert processed(sample, logits)[:4] == [2.0, 2.0 - 0.75, -8.0 - 1.0, 4.0]


def test_end_ids_wait_for_min_tokens() -> None:
    params = replace(PLAIN, min_tokens=2)
    ends = frozenset({4, 7})
    early = processed(Sample(params, outputs=(9,), end_token_ids=ends))
    assert {i for i, value in enumerate(early) if value == -math.inf} == ends
    late = processed(Sample(params, outputs=(9, 9), end_token_ids=ends))
    assert late == [1.0] * VOCAB


def test_bad_words_by_what_stands_before() -> None:
    params = replace(PLAIN, bad_words=((5,), (1, 2), (1, 2, 3), (9, 9, 9)))

    def banned(*outputs: int) -> set[int]:
        values = processed(Sample(params, prompt=(1,), outputs=outputs))
        return {i for i, value in enumerate(values) if value == -math.inf}

    assert banned() == {5}  # the prompt begins no word
    assert banned(1) == {2, 5}
    assert banned(7, 1, 2) == {3, 5}
    assert banned(9) == {5}
    assert banned(9, 9) == {5, 9}


@pytest.mark.parametrize(
    ("grammar", "allowed", "bad", "left"),
    [
        ({1, 2, 66}, (2, 66, 5), (66,), {2}),
        ({1, 2}, (), (1, 2), {1, 2}),  # a grammar is never left without a way on
        ({1, 2}, (3,), (), {1, 2}),
        (None, (3, 4), (3,), {4}),
        (None, (3,), (3,), {3}),
    ],
)
def test_masks_give_way_in_order(
    grammar: set[int] | None, allowed: tuple[int, ...], bad: tuple[int, ...], left: set[int]
) -> None:
    params = replace(PLAIN, allowed_token_ids=allowed, bad_words=tuple((i,) for i in bad))
    words = None if grammar is None else frozenset(grammar)
    values = processed(Sample(params, grammar=words))
    assert {i for i, value in enumerate(values) if value > -math.inf} == left


def test_a_grammar_needs_no_rules() -> None:
    values = processed(Sample(PLAIN, grammar=frozenset({0, 31, 32, 63, 64})))
    assert [i for i, value in enumerate(values) if value > -math.inf] == [0, 31, 32, 63, 64]


def test_words_are_little_endian_bits() -> None:
    words = pack_words([0, 33, 31], VOCAB)
    assert words.tolist() == [1 - (1 << 31), 2, 0]
    assert remove_ids(words, [31, 33, 66]).tolist() == [1, 0, 0]
    assert words.tolist() == [1 - (1 << 31), 2, 0]


def test_catching_up_is_as_good_as_having_been_there() -> None:
    params = replace(PLAIN, repetition_penalty=1.2, frequency_penalty=0.5)
    outputs = np.random.default_rng(1).integers(0, 200, 300)
    steady = LogitRules(params, (7, 8), ())
    for count in range(301):
        steady.catch_up(outputs[:count])
    late = LogitRules(params, (7, 8), ())
    late.catch_up(outputs)
    for rules in (steady, late):
        counts = dict(zip(rules.seen_token_ids.tolist(), rules.output_counts.tolist(), strict=True))
        expected = {i: float((outputs == i).sum()) for i in {7, 8, *outputs.tolist()}}
        assert counts == expected
