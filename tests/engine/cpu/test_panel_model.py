"""The decoder on our own kernels: against transformers in float32, against torch's in bfloat16, and
against itself, bit for bit, however a batch is put together and however many threads share it."""

import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("numba")

from engine.batch import BatchInput, BatchRow
from engine.config import ModelConfig
from engine.cpu.model import PanelModel, unsupported
from engine.cpu.team import Team
from engine.kv_cache import KVCache
from engine.model import Model
from engine.weights import random_reader, random_weights, read_weights
from tests.engine.conftest import TinyModel
from tests.engine.model_driver import ModelDriver, random_prompt

CPU = torch.device("cpu")


def load(tiny: TinyModel, num_threads: int = 2) -> PanelModel:
    config, team = ModelConfig.from_folder(tiny.folder), Team(num_threads)
    return read_weights(
        tiny.folder, config, torch.float32, CPU, lambda reader: PanelModel.read(reader, team)
    )


@pytest.fixture
def panels(wide_model: TinyModel) -> Iterator[PanelModel]:
    model = load(wide_model)
    yield model
    model.close()


@pytest.fixture
def llama(wide_llama: TinyModel) -> Iterator[PanelModel]:
    model = load(wide_llama)
    yield model
    model.close()


def drive(model: PanelModel, block_size: int = 4) -> ModelDriver:
    return ModelDriver(model, model.config, torch.float32, CPU, block_size)


def test_logits_are_those_of_transformers(wide_model: TinyModel, panels: PanelModel) -> None:
    """Prompts by products and single tokens over blocks, on both sides of 64 keys."""
    token_ids = random_prompt(161, seed=1)
    with torch.no_grad():
        expected = wide_model.reference(torch.tensor([token_ids])).logits[0]
    driver = drive(panels)
    seq = driver.add(token_ids, 161)
    for n in (7, 16, 1, 1, 30, 2, 6, 1, 1, 70, 1, 25):
        logits = driver.step([(seq, n)])
        torch.testing.assert_close(logits[0], expected[seq.num_computed - 1], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("block_size", [1, 3, 16, 64])
def test_ragged_batches_generate_the_tokens_of_transformers(
    wide_model: TinyModel, panels: PanelModel, block_size: int
) -> None:
    lengths = (1, 5, 12) if block_size == 1 else (1, 5, 23, 40, 64)
    prompts = [random_prompt(length, seed=length) for length in lengths]
    outputs = drive(panels, block_size).generate(prompts, num_output=12, chunk_seed=5)
    for prompt, output in zip(prompts, outputs, strict=True):
        generated = wide_model.reference.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt)),
            do_sample=False,
            max_new_tokens=12,
            pad_token_id=0,
        )
        assert output == generated[0, len(prompt) :].tolist()


def ragged_step(model: PanelModel, spans: list[tuple[int, int]], order: list[int]) -> list[Tensor]:
    """Logits of (computed, new) spans of random sequences over KV of random values, batched in
    `order`; one row each, in the order of the spans."""
    kv = KVCache(model.config, 160, 4, torch.float32, CPU)
    kv.data.copy_(torch.randn(kv.data.shape, generator=torch.Generator().manual_seed(1)))
    rows = []
    for index, (computed, new) in enumerate(spans):
        token_ids = np.array(random_prompt(new, seed=index), dtype=np.int64)
        blocks = np.array(random.Random(index).sample(range(20), 20), dtype=np.int64)
        rows.append(BatchRow(token_ids, computed, blocks + 20 * index, wants_logits=True))
    logits = model.forward(BatchInput.build([rows[i] for i in order], 4, CPU), kv).logits
    return [logits[order.index(i)].clone() for i in range(len(spans)) if i in order]


def test_a_row_is_the_same_bits_whatever_is_beside_it(llama: PanelModel) -> None:
    spans = [(0, 30), (70, 1), (3, 1), (10, 2), (0, 1), (40, 13), (65, 15), (79, 1)]
    together = ragged_step(llama, spans, list(range(8)))
    shuffled = ragged_step(llama, spans, [5, 2, 7, 0, 3, 1, 6, 4])
    alone = [ragged_step(llama, spans, [i])[0] for i in range(8)]
    for a, b, c in zip(together, shuffled, alone, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c)


@pytest.mark.parametrize("num_threads", [1, 3])
def test_threads_do_not_change_a_bit(
    wide_llama: TinyModel, llama: PanelModel, num_threads: int
) -> None:
    spans, order = [(0, 64), (70, 1), (3, 1)], [0, 1, 2]
    other = load(wide_llama, num_threads)
    for a, b in zip(
        ragged_step(llama, spans, order), ragged_step(other, spans, order), strict=True
    ):
        assert torch.equal(a, b)
    other.close()


def test_only_wanted_logits_are_computed(llama: PanelModel) -> None:
    driver = drive(llama)
    seqs = [driver.add(random_prompt(6, seed), 6) for seed in range(3)]
    assert driver.step([(seq, 6) for seq in seqs]).shape == (3, 199)
    kv = KVCache(llama.config, 4, 4, torch.float32, CPU)
    row = BatchRow(np.array([1, 2]), 0, np.array([2]), wants_logits=False)
    assert llama.forward(BatchInput.build([row], 4, CPU), kv).logits.shape == (0, 199)


def test_logits_of_any_rows(llama: PanelModel) -> None:
    kv = KVCache(llama.config, 8, 4, torch.float32, CPU)
    rows = [
        BatchRow(np.array(random_prompt(n, n)), 0, np.arange(4) + 4 * i, wants_logits=True)
        for i, n in enumerate((16, 3))
    ]
    output = llama.forward(BatchInput.build(rows, 4, CPU), kv)
    assert output.hidden.shape == (19, llama.config.hidden_size)
    assert torch.equal(llama.logits(output.hidden[[15, 18]]), output.logits)
    assert llama.logits(output.hidden).shape == (19, 199)


def test_bfloat16_is_no_worse_than_torchs(wide_llama: TinyModel) -> None:
    """Both beside float32; ours rounds less often."""
    config, team = ModelConfig.from_folder(wide_llama.folder), Team(1)
    reader = random_reader(config, 1, torch.bfloat16, CPU)
    ours = PanelModel.read(reader, team)
    theirs, exact = (
        Model(config, random_weights(config, 1, dtype, CPU))
        for dtype in (torch.bfloat16, torch.float32)
    )
    assert ours.digest == theirs.digest
    token_ids = random_prompt(120, seed=2)
    logprobs = []
    for model, dtype in (
        (ours, torch.bfloat16),
        (theirs, torch.bfloat16),
        (exact, torch.float32),
    ):
        driver = ModelDriver(model, config, dtype, CPU)
        seq = driver.add(token_ids, 120)
        steps = [driver.step([(seq, n)])[0] for n in (70, 1, 1, 40, 1)]
        logprobs.append(torch.stack(steps).log_softmax(-1))
    ours_off, theirs_off = ((a - logprobs[2]).abs().mean() for a in logprobs[:2])
    assert ours_off <= theirs_off * 1.05
    assert (logprobs[0] - logprobs[2]).abs().max() < 0.1


def test_infinities_left_in_slots_do_no_harm(llama: PanelModel) -> None:
    driver = drive(llama)
    clean = driver.step([(driver.add(random_prompt(70, 1), 70), 70)])
    dirty_driver = drive(llama)
    dirty_driver.kv.data.fill_(torch.inf)
    seq = dirty_driver.add(random_prompt(70, 1), 71)
    assert torch.equal(dirty_driver.step([(seq, 70)]), clean)
    seq.token_ids.append(3)
    assert dirty_driver.step([(seq, 1)]).isfinite().all()


@pytest.mark.parametrize(
    ("token_id", "computed", "block_id"), [(199, 0, 0), (-1, 0, 0), (0, 0, 4), (0, 4, 0)]
)
def test_nothing_is_read_out_of_bounds(
    llama: PanelModel, token_id: int, computed: int, block_id: int
) -> None:
    kv = KVCache(llama.config, 4, 4, torch.float32, CPU)
    row = BatchRow(np.array([token_id]), computed, np.array([block_id]), wants_logits=True)
    with pytest.raises((AssertionError, IndexError)):
        llama.forward(BatchInput.build([row], 4, CPU), kv)


def test_unsupported_models_are_told_apart(tiny_llama: TinyModel, wide_llama: TinyModel) -> None:
    narrow, wide = (ModelConfig.from_folder(tiny.folder) for tiny in (tiny_llama, wide_llama))
    assert unsupported(narrow, torch.float32) == "head_dim is 8, not a multiple of 32"
    assert "float16" in unsupported(wide, torch.float16)
    assert unsupported(wide, torch.bfloat16) == ""
