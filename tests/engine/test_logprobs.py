"""Logprobs of a step: what they are of, and what is told of each row."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.logprobs import StepLogprobs
from engine.request import MAX_TOP_LOGPROBS, SamplingParams, TokenLogprobs
from engine.sampler import sample_tokens
from tests.engine.plain_sampler import VOCAB, Sample, random_logits


def told(
    logits: torch.Tensor, token_ids: list[int], counts: list[int]
) -> list[TokenLogprobs | None]:
    step = StepLogprobs(logits, counts)
    read = step.pack(torch.tensor(token_ids)).numpy()
    assert read[: len(token_ids)].tolist() == token_ids
    return step.unpack(read)


@settings(max_examples=100, deadline=None)
@given(
    counts=st.lists(st.sampled_from((0, 1, 2, 6, 21)), min_size=1, max_size=6),
    seed=st.integers(0, 1000),
)
def test_each_row_is_told_its_own(counts: list[int], seed: int) -> None:
    logits = random_logits(len(counts), seed)
    token_ids = np.random.default_rng(seed).integers(0, VOCAB, len(counts)).tolist()
    together = told(torch.from_numpy(logits), token_ids, counts)
    if not any(counts):
        assert together == []
        return
    for row, (count, token_id) in enumerate(zip(counts, token_ids, strict=True)):
        entry = together[row]
        if count == 0:
            assert entry is None
            continue
        assert entry is not None
        check(entry, logits[row].tolist(), token_id, count)
        alone = told(torch.from_numpy(logits[row : row + 1]), [token_id], [count])
        assert alone == [entry]


def check(entry: TokenLogprobs, logits: list[float], token_id: int, count: int) -> None:
    total = math.log(sum(math.exp(value) for value in logits))
    assert entry.logprob == pytest.approx(logits[token_id] - total, abs=1e-5)
    assert entry.rank == 1 + sum(value > logits[token_id] for value in logits)
    assert len(entry.top_token_ids) == len(entry.top_logprobs) == count - 1
    likeliest = sorted(logits, reverse=True)[: count - 1]
    assert [logits[i] for i in entry.top_token_ids] == likeliest
    expected = [value - total for value in likeliest]
    assert entry.top_logprobs == pytest.approx(expected, abs=1e-5)


def test_nobody_asks() -> None:
    token_ids = torch.tensor([3, 4])
    step = StepLogprobs(torch.randn(2, VOCAB), [0, 0])
    assert step.pack(token_ids) is token_ids
    assert step.unpack(np.array([3, 4], dtype=np.int32)) == []


def test_a_small_vocabulary_has_fewer_than_the_most() -> None:
    (entry,) = told(torch.zeros(1, 3), [2], [1 + MAX_TOP_LOGPROBS])
    assert entry is not None
    assert sorted(entry.top_token_ids) == [0, 1, 2]


def test_they_are_of_what_the_model_said() -> None:
    """Not of what bias, masks and temperature made of it."""
    params = SamplingParams(max_tokens=9, temperature=0.1, logit_bias=((5, 100.0),))
    sample = Sample(replace(params, allowed_token_ids=(5, 6)))
    logits = torch.zeros(1, VOCAB)
    token_ids = sample_tokens(logits, [sample.row()])
    (entry,) = told(logits, token_ids.tolist(), [1])
    assert token_ids.tolist() == [5]
    assert entry is not None
    assert entry.logprob == pytest.approx(-math.log(VOCAB), abs=1e-5)
