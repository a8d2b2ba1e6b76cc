import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.request import SamplingParams
from engine.sampler import SampleRow, gumbel_noise, noise_keys, sample_tokens

GOLDEN_KEYS = ["238275bc38fcbe91", "b18a02f46d8d86c3", "44e5b98100c67fb0", "2f32a78496c67c60"]
GOLDEN_NOISE = [0.125869, -0.003468, -0.080517, -0.60884, -0.742916, 1.064363]


def row(
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    sample: int = 0,
    index: int = 0,
) -> SampleRow:
    params = SamplingParams(
        max_tokens=100, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed
    )
    return SampleRow(params, sample, index)


def draw(logits: torch.Tensor, template: SampleRow, count: int) -> npt.NDArray[np.int64]:
    """Token counts, [vocab], of `count` output indices of one sequence."""
    rows = [SampleRow(template.params, 0, i) for i in range(count)]
    tokens = sample_tokens(logits.expand(count, -1), rows)
    return np.bincount(tokens.numpy(), minlength=logits.shape[0])


def test_greedy_takes_the_largest() -> None:
    logits = torch.randn(5, 50, generator=torch.Generator().manual_seed(1))
    tokens = sample_tokens(logits, [row(temperature=0.0)] * 5)
    assert tokens.tolist() == logits.argmax(dim=-1).tolist()


def test_noise_is_golden() -> None:
    """The same on every machine and in every version: a resumed request must draw alike."""
    rows = [row(seed=0), row(seed=1), row(seed=0, sample=1), row(seed=0, index=1)]
    keys = noise_keys(rows)
    assert [f"{key:016x}" for key in keys] == GOLDEN_KEYS
    noise = gumbel_noise(torch.tensor([[1, -7], [2, 3]], dtype=torch.int32), 3)
    assert noise.flatten().tolist() == pytest.approx(GOLDEN_NOISE, abs=1e-6)


def test_noise_is_gumbel_distributed_and_uncorrelated() -> None:
    """Mean is Euler's constant, variance pi^2 / 6; neither rows nor neighbours go together."""
    keys = np.arange(64, dtype=np.int32)
    noise = gumbel_noise(torch.from_numpy(np.stack([keys, keys * 77])), 5000).double()
    assert torch.isfinite(noise).all()
    assert abs(noise.mean().item() - 0.5772) < 0.01
    assert abs(noise.var().item() - np.pi**2 / 6) < 0.02
    across_rows = torch.corrcoef(noise) - torch.eye(64)
    assert across_rows.abs().max() < 0.08
    assert abs(torch.corrcoef(torch.stack([noise[:, 1:], noise[:, :-1]]).flatten(1))[0, 1]) < 0.01


def test_seeds_of_any_size_are_taken() -> None:
    rows = [row(seed=seed) for seed in (-1, 2**64 - 2, 2**80)]
    assert len(set(noise_keys(rows).tolist())) == 3


def test_a_draw_survives_the_rounding_of_another_split() -> None:
    """Errors as large as those of float32 over 30 layers move next to none of the draws."""
    generator = torch.Generator().manual_seed(3)
    logits = 2 * torch.randn(200, 20_000, generator=generator)
    noisy = logits + 1e-5 * torch.randn(logits.shape, generator=generator)
    rows = [row(seed=i) for i in range(200)]
    moved = sample_tokens(logits, rows) != sample_tokens(noisy, rows)
    assert moved.sum() <= 1


def test_draws_follow_the_distribution() -> None:
    probs = torch.tensor([0.5, 0.1, 0.25, 0.15])
    counts = draw(probs.log(), row(), 8000)
    assert np.abs(counts / 8000 - probs.numpy()).max() < 0.02


def test_temperature_sharpens() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0])
    expected = torch.softmax(logits / 0.5, dim=-1).numpy()
    assert np.abs(draw(logits, row(temperature=0.5), 8000) / 8000 - expected).max() < 0.02
    assert draw(1e4 * logits, row(temperature=1e-4), 10).tolist() == [0, 0, 10]


def test_top_k_keeps_k_and_ties_with_the_last() -> None:
    probs = torch.tensor([0.1, 0.4, 0.2, 0.3])
    counts = draw(probs.log(), row(top_k=2), 4000)
    assert counts[0] == counts[2] == 0
    assert abs(counts[1] / 4000 - 4 / 7) < 0.03
    assert (draw(torch.zeros(4), row(top_k=2), 400) > 0).all()
    assert (draw(probs.log(), row(top_k=99), 400) > 0).all()


def test_top_p_keeps_the_smallest_set_that_reaches_p() -> None:
    logits = torch.tensor([0.1, 0.4, 0.2, 0.3]).log()
    assert (draw(logits, row(top_p=0.69), 500) > 0).tolist() == [False, True, False, True]
    assert (draw(logits, row(top_p=0.71), 500) > 0).tolist() == [False, True, True, True]
    assert draw(logits, row(top_p=1e-9), 100).tolist() == [0, 100, 0, 0]


def test_top_p_is_over_what_top_k_left() -> None:
    logits = torch.tensor([0.1, 0.4, 0.2, 0.3]).log()
    counts = draw(logits, row(top_k=2, top_p=0.6), 500)  # 4/7 and 3/7: both are needed
    assert (counts > 0).tolist() == [False, True, False, True]
    assert draw(logits, row(top_k=2, top_p=0.5), 100).tolist() == [0, 100, 0, 0]


def test_top_p_counts_all_that_tie_with_the_last_of_top_k() -> None:
    """A top-k of 2 leaves all three of 0.2; the first alone is less than half of what is left."""
    logits = torch.tensor([0.4, 0.2, 0.2, 0.2]).log()
    kept = draw(logits, row(top_k=2, top_p=0.5), 400) > 0
    assert kept.tolist() == [True, True, True, True]
    assert (draw(logits, row(top_k=2, top_p=0.39), 400) > 0).tolist() == [True, False, False, False]


def test_a_top_k_beyond_the_vocabulary_leaves_top_p_alone() -> None:
    logits = torch.cat((torch.tensor([0.9, 0.1]), torch.full((298,), 1e-6))).log()
    for top_k in (0, 257, 300, 1 << 30):
        assert draw(logits, row(top_k=top_k, top_p=0.5), 200)[0] == 200, top_k


def test_a_masked_token_is_never_drawn() -> None:
    logits = torch.full((1000,), -torch.inf)
    logits[[3, 998]] = 0.0
    counts = draw(logits, row(), 2000)
    assert counts[3] + counts[998] == 2000
    assert min(counts[3], counts[998]) > 900


rows = st.builds(
    row,
    temperature=st.sampled_from((0.0, 0.3, 1.0, 2.0)),
    top_k=st.sampled_from((0, 1, 5, 200, 270, 1000)),
    top_p=st.sampled_from((1.0, 0.9, 0.1)),
    seed=st.integers(0, 2**64 - 1),
    sample=st.integers(0, 3),
    index=st.integers(0, 1000),
)


@settings(max_examples=100, deadline=None)
@given(batch=st.lists(rows, min_size=1, max_size=8), seed=st.integers(0, 1000))
def test_a_row_does_not_depend_on_its_batch(batch: list[SampleRow], seed: int) -> None:
    logits = 3 * torch.randn(len(batch), 301, generator=torch.Generator().manual_seed(seed))
    together = sample_tokens(logits, batch).tolist()
    alone = [sample_tokens(logits[i : i + 1], [batch[i]]).item() for i in range(len(batch))]
    assert together == alone
