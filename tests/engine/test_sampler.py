import numpy as np
import numpy.typing as npt
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.request import SamplingParams
from engine.sampler import SampleRow, sample_tokens, uniforms

GOLDEN = [0.13870941014555427, 0.6935121390102292, 0.2691303195904541, 0.18436667429957676]


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


def test_uniforms_are_golden_and_uniform() -> None:
    golden = uniforms([row(seed=0), row(seed=1), row(seed=0, sample=1), row(seed=0, index=1)])
    assert golden.tolist() == GOLDEN
    many = uniforms([row(seed=s, index=i) for s in range(100) for i in range(100)])
    counts = np.bincount((many * 10).astype(int), minlength=10)
    assert len(counts) == 10
    assert np.abs(counts - 1000).max() < 150
    assert len(np.unique(many)) == 10_000


def test_seeds_of_any_size_are_taken() -> None:
    for seed in (-1, 2**64 - 1, 2**80):
        assert 0 <= uniforms([row(seed=seed)])[0] < 1


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
