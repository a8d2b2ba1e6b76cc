"""The kernels' draw says what numpy's says, and what torch's says, token for token: workers whose
logits are chosen from by different code must not disagree about a seed."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import host_sampler, sampler
from engine.request import SamplingParams
from engine.sampler import SampleRow, noise_keys, sample_tokens

pytest.importorskip("numba")

from engine.cpu.sampler import KernelSampler
from engine.cpu.team import Team

VOCAB = 5003  # no whole vectors
Row = npt.NDArray[np.float32]


@pytest.fixture(scope="module")
def kernels() -> KernelSampler:
    return KernelSampler(VOCAB, Team(1))


def row_of(shape: str, seed: int, vocab: int = VOCAB) -> Row:
    generator = np.random.default_rng(seed)
    normal = generator.standard_normal(vocab)
    if shape == "flat":
        normal *= 0.01
    elif shape == "peaked":
        normal = -np.abs(6 * normal)
    elif shape == "one above all":
        normal[seed % vocab] = 60.0
    elif shape == "masked":
        normal[generator.random(vocab) < 0.999] = -np.inf
        normal[seed % vocab] = 0.0
    elif shape == "one allowed":
        normal[:] = -np.inf
        normal[seed % vocab] = -3.0
    elif shape == "steps":
        normal = np.round(2 * normal)
    elif shape == "all equal":
        normal[:] = 7.5
    elif shape == "two levels":
        normal[:] = np.where(np.arange(vocab) % 7 == seed % 7, 2.0, -1.0)
    elif shape == "far apart":
        normal *= 1e30
    else:
        assert shape == "subnormal"
        normal *= 1e-40
    return normal.astype(np.float32)


SHAPES = (
    *("flat", "peaked", "one above all", "masked", "one allowed", "steps", "all equal"),
    *("two levels", "far apart", "subnormal"),
)

wishes = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from((1e-6, 0.05, 0.7, 1.0, 1.3, 100.0)),
        "top_k": st.sampled_from((0, 1, 2, 40, 300, 4900, VOCAB, 2 * VOCAB)),
        "top_p": st.sampled_from((1.0, 1 - 1e-12, 0.999, 0.95, 0.5, 0.01, 1e-9)),
        "min_p": st.sampled_from((0.0, 1e-9, 1e-3, 0.05, 1.0)),
        "seed": st.integers(0, 2**64 - 1),
    }
)


def drawn_by(draw: Any, logits: Row, rows: Sequence[SampleRow]) -> list[int]:
    chosen: list[int] = sample_tokens(torch.from_numpy(logits), rows, draw).tolist()
    return chosen


def row(index: int = 0, **changes: Any) -> SampleRow:
    return SampleRow(SamplingParams(**{"max_tokens": 9, "temperature": 1.0, **changes}), 0, index)


@settings(max_examples=300, deadline=None)
@given(shape=st.sampled_from(SHAPES), seed=st.integers(0, 1000), wish=wishes)
def test_they_say_what_numpy_says(
    shape: str, seed: int, wish: dict[str, Any], kernels: KernelSampler
) -> None:
    logits = np.stack([row_of(shape, seed), row_of("peaked", seed)])
    rows = [row(seed, **wish), row(seed + 1, **wish)]
    expected = drawn_by(host_sampler.draw_tokens, logits, rows)
    assert drawn_by(kernels.draw_tokens, logits, rows) == expected


@settings(max_examples=100, deadline=None)
@given(shape=st.sampled_from(SHAPES), seed=st.integers(0, 1000), wish=wishes)
def test_noise_beats_filters_as_if_all_scores_were_there(
    shape: str, seed: int, wish: dict[str, Any], kernels: KernelSampler
) -> None:
    """Against the plain rule: the largest of scaled logits plus noise, over what is kept."""
    logits, one = row_of(shape, seed), row(seed, **wish)
    with np.errstate(over="ignore"):
        scaled = (logits - logits.max()) / np.float32(one.params.temperature)
    (key,) = noise_keys([one]).tolist()
    scores = scaled + host_sampler.gumbel_noise(np.arange(VOCAB), key)
    kept = host_sampler.keep(scaled, one.params)
    if kept is not None:
        scores[np.setdiff1d(np.arange(VOCAB), kept)] = -np.inf
    assert drawn_by(kernels.draw_tokens, logits[None], [one]) == [scores.argmax()]


@settings(max_examples=40, deadline=None)
@given(shape=st.sampled_from(SHAPES), seed=st.integers(0, 1000))
def test_they_say_what_torch_says(shape: str, seed: int, kernels: KernelSampler) -> None:
    if shape in ("far apart", "subnormal"):
        return  # float32's noise and float64's differ in the last place there
    changes: list[dict[str, Any]] = [{}, {"top_k": 40}, {"top_p": 0.9}, {"min_p": 0.1}]
    rows = [row(7, seed=seed, **change) for change in changes]
    logits = np.stack([row_of(shape, seed + i) for i in range(len(rows))])
    tensor = torch.from_numpy(logits)
    by_torch = sampler._draw_on_device(tensor, [*range(4)], rows, tensor.argmax(dim=-1))
    assert drawn_by(kernels.draw_tokens, logits, rows) == by_torch.tolist()


@pytest.mark.parametrize("vocab", [1, 2, 15, 16, 17, 256, 257])
def test_small_vocabularies(vocab: int) -> None:
    small = KernelSampler(vocab, Team(1))
    for seed in range(20):
        logits = row_of("flat", seed, vocab)[None]
        for changes in ({}, {"top_p": 0.5}, {"top_k": 1}, {"top_k": 3, "top_p": 0.9}):
            one = row(seed, seed=seed, **changes)
            expected = drawn_by(host_sampler.draw_tokens, logits, [one])
            assert drawn_by(small.draw_tokens, logits, [one]) == expected


def test_a_team_says_what_one_thread_says() -> None:
    team = Team(3)
    shared = KernelSampler(VOCAB, team)
    try:
        logits = np.stack([row_of("flat", index) for index in range(32)])
        rows = [row(index, seed=index, top_p=1 - 0.1 * (index % 3)) for index in range(32)]
        rows[5] = row(temperature=0.0)  # greedy ones stand between them
        expected = drawn_by(host_sampler.draw_tokens, logits, rows)
        for _ in range(50):
            assert drawn_by(shared.draw_tokens, logits, rows) == expected
    finally:
        team.close()
