"""The kernels' sampler says what numpy's and torch's say, token for token: workers whose logits are
chosen from by different code must not disagree about a seed."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import host_sampler, sampler
from engine.logprobs import logprob_table, read_table
from engine.request import SamplingParams
from engine.sampler import Sampler, SampleRow, TorchSampler, noise_keys
from tests.engine import plain_sampler

pytest.importorskip("numba")

from engine.cpu.sampler import KernelSampler
from engine.cpu.team import Team

VOCAB = 5003  # no whole vectors
BY_NUMPY = TorchSampler()
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


def drawn(sampler: Sampler, logits: Row, rows: Sequence[SampleRow]) -> list[int]:
    chosen: list[int] = sampler.sample_tokens(torch.from_numpy(logits), rows).tolist()
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
    expected = drawn(BY_NUMPY, logits, rows)
    assert drawn(kernels, logits, rows) == expected


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
    assert drawn(kernels, logits[None], [one]) == [scores.argmax()]


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
    assert drawn(kernels, logits, rows) == by_torch.tolist()


@pytest.mark.parametrize("vocab", [1, 2, 15, 16, 17, 256, 257])
def test_small_vocabularies(vocab: int) -> None:
    small = KernelSampler(vocab, Team(1))
    for seed in range(20):
        logits = row_of("flat", seed, vocab)[None]
        for changes in ({}, {"top_p": 0.5}, {"top_k": 1}, {"top_k": 3, "top_p": 0.9}):
            one = row(seed, seed=seed, **changes)
            expected = drawn(BY_NUMPY, logits, [one])
            assert drawn(small, logits, [one]) == expected


def test_a_team_says_what_one_thread_says() -> None:
    team = Team(3)
    shared = KernelSampler(VOCAB, team)
    try:
        logits = np.stack([row_of("flat", index) for index in range(32)])
        rows = [row(index, seed=index, top_p=1 - 0.1 * (index % 3)) for index in range(32)]
        rows[5] = row(temperature=0.0)  # greedy ones stand between them
        expected = drawn(BY_NUMPY, logits, rows)
        for _ in range(50):
            assert drawn(shared, logits, rows) == expected
    finally:
        team.close()


@pytest.fixture(scope="module")
def small_kernels() -> KernelSampler:
    return KernelSampler(plain_sampler.VOCAB, Team(1))


@settings(max_examples=300, deadline=None)
@given(batch=st.lists(plain_sampler.samples, min_size=1, max_size=6), seed=st.integers(0, 1000))
def test_masks_biases_and_penalties_are_numpy_s(
    batch: list[plain_sampler.Sample], seed: int, small_kernels: KernelSampler
) -> None:
    logits = plain_sampler.random_logits(len(batch), seed)
    before = logits.copy()
    rows = [sample.row() for sample in batch]
    assert drawn(small_kernels, logits, rows) == drawn(BY_NUMPY, logits, rows)
    assert np.array_equal(logits, before), "they are left as they are"


def test_nobody_writes_beside_a_row(small_kernels: KernelSampler) -> None:
    params = SamplingParams(max_tokens=9, logit_bias=((plain_sampler.VOCAB, 1.0),))
    with pytest.raises(AssertionError):
        drawn(
            small_kernels, plain_sampler.random_logits(1, 0), [plain_sampler.Sample(params).row()]
        )


@settings(max_examples=60, deadline=None)
@given(
    shape=st.sampled_from(SHAPES[:8]),
    seed=st.integers(0, 1000),
    num_rows=st.integers(1, 5),
    has_top=st.booleans(),
)
def test_logprobs_are_torch_s(
    shape: str, seed: int, num_rows: int, has_top: bool, kernels: KernelSampler
) -> None:
    logits = torch.from_numpy(np.stack([row_of(shape, seed + i) for i in range(num_rows)]))
    chosen = torch.from_numpy(np.random.default_rng(seed).integers(0, VOCAB, num_rows))
    counts = [21 if has_top else 1] * num_rows
    table = kernels.logprob_table(logits, chosen, has_top=has_top)
    expected = logprob_table(logits, chosen, has_top=has_top)
    ours, theirs = read_table(table.numpy(), counts), read_table(expected.numpy(), counts)
    for row, mine, other in zip(logits, ours, theirs, strict=True):
        assert mine.rank == other.rank
        assert mine.logprob == pytest.approx(other.logprob, abs=1e-5)
        assert mine.top_logprobs == pytest.approx(other.top_logprobs, abs=1e-5)
        in_order = sorted(range(VOCAB), key=lambda i: (-float(row[i]), i))
        assert list(mine.top_token_ids) == in_order[: len(mine.top_token_ids)]


@pytest.mark.parametrize("vocab", [1, 3, 17, 33])
def test_logprobs_of_small_vocabularies(vocab: int) -> None:
    small = KernelSampler(vocab, Team(1))
    logits = torch.from_numpy(row_of("steps", 3, vocab)[None])
    (told,) = read_table(small.logprob_table(logits, torch.tensor([0]), has_top=True).numpy(), [21])
    assert sorted(told.top_token_ids) == [*range(min(vocab, 20))] or vocab > 20
    total = logits[0].double().logsumexp(0).item()
    assert told.logprob == pytest.approx(float(logits[0, 0]) - total, abs=1e-5)
