"""The draw on the CPU: that it leaves out only work, and says what the device's says."""

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import sampler
from engine.host_sampler import gumbel_noise, keep
from engine.request import SamplingParams
from engine.sampler import SampleRow, noise_keys, sample_tokens

VOCAB = 5000
IDS = np.arange(VOCAB)


def rows_of(shape: str, seed: int) -> npt.NDArray[np.float32]:
    """[VOCAB] logits: flat, peaked, one above all, mostly masked, or in steps."""
    generator = np.random.default_rng(seed)
    normal = generator.standard_normal(VOCAB)
    if shape == "flat":
        normal *= 0.01
    elif shape == "peaked":
        normal = -np.abs(6 * normal)
    elif shape == "one":
        normal[seed % VOCAB] = 60.0
    elif shape == "masked":
        normal[generator.random(VOCAB) < 0.999] = -np.inf
        normal[seed % VOCAB] = 0.0
    else:
        normal = np.round(2 * normal)
    return normal.astype(np.float32)


SHAPES = ("flat", "peaked", "one", "masked", "steps")


def params_of(**changes: float) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 9, "temperature": 1.0, **changes})  # type: ignore[arg-type]


@settings(max_examples=150, deadline=None)
@given(
    shape=st.sampled_from(SHAPES),
    seed=st.integers(0, 2**64 - 1),
    temperature=st.sampled_from((0.05, 0.7, 1.0, 3.0)),
    index=st.integers(0, 100),
)
def test_it_is_the_largest_of_all_scores(
    shape: str, seed: int, temperature: float, index: int
) -> None:
    """Although the noise of next to none of the tokens is computed."""
    logits = rows_of(shape, seed % 1000)
    row = SampleRow(params_of(temperature=temperature, seed=seed), 0, index)
    (key,) = noise_keys([row]).tolist()
    scaled = (logits - logits.max()) / np.float32(temperature)
    scores = scaled + gumbel_noise(IDS, key)
    assert sample_tokens(torch.from_numpy(logits[None]), [row]).item() == scores.argmax()


@settings(max_examples=150, deadline=None)
@given(
    shape=st.sampled_from(SHAPES),
    seed=st.integers(0, 1000),
    top_k=st.sampled_from((0, 1, 40, 300, 4900, 6000)),
    top_p=st.sampled_from((1.0, 0.999, 0.9, 0.2)),
    min_p=st.sampled_from((0.0, 1e-6, 0.05)),
)
def test_near_tokens_decide_as_all_would(
    shape: str, seed: int, top_k: int, top_p: float, min_p: float
) -> None:
    """What is kept is what the device's filter keeps, which looks at all tokens; but for the
    rounding of a mass that is `top_p` itself."""
    logits = rows_of(shape, seed)
    scaled = logits - logits.max()

    def by_device(top_p: float) -> set[int]:
        filtered = torch.from_numpy(scaled.copy()[None])
        sampler._filter(filtered, [params_of(top_k=top_k, top_p=top_p, min_p=min_p)])
        return {*np.flatnonzero(filtered[0].numpy() > -np.inf).tolist()}

    kept = keep(scaled, params_of(top_k=top_k, top_p=top_p, min_p=min_p))
    found = {*(np.flatnonzero(scaled > -np.inf) if kept is None else kept).tolist()}
    if top_p == 1.0:
        assert found == by_device(1.0)
    else:
        assert by_device(top_p - 1e-6) <= found <= by_device(top_p + 1e-6)


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 1000), shape=st.sampled_from(SHAPES))
def test_host_and_device_say_the_same(seed: int, shape: str) -> None:
    logits = torch.from_numpy(np.stack([rows_of(shape, seed + i) for i in range(5)]))
    changes: list[dict[str, float]] = [
        {},
        {"top_k": 40},
        {"top_p": 0.9},
        {"top_p": 0.95, "top_k": 300},
        {"min_p": 0.1},
    ]
    rows = [SampleRow(params_of(seed=seed, **change), 0, 7) for change in changes]
    on_device = sampler._draw_on_device(logits, [*range(5)], rows, logits.argmax(dim=-1))
    assert sample_tokens(logits, rows).tolist() == on_device.tolist()


def test_noise_is_the_device_s() -> None:
    for key in (0, 1, 2**63 + 12345, 2**64 - 1):
        halves = np.array([key], dtype=np.uint64).view(np.int32).reshape(2, 1)
        expected = sampler.gumbel_noise(torch.from_numpy(halves), VOCAB)[0]
        assert gumbel_noise(IDS, key) == pytest.approx(expected.numpy(), abs=1e-4)
