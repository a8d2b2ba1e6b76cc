"""FlashInfer behind our interface: what it is planned with and called with, against the reference.
The library itself needs a card (tests/gpu); here is its contract."""

import random

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.attention import AttentionFactory, GatherAttention
from engine.batch import BatchInput, BatchRow
from engine.config import ModelConfig
from engine.cuda.flashinfer_attention import FlashInfer
from engine.cuda.flashinfer_library import (
    INT_WORKSPACE_NBYTES,
    WORKSPACE_NBYTES,
    use_tensor_cores,
    window_left,
)
from engine.kv_cache import KVCache
from engine.model import Model
from engine.weights import ModelWeights, read_weights
from tests.engine.conftest import TinyModel
from tests.engine.cuda.fake_flashinfer import FakeFlashInfer
from tests.engine.model_driver import ModelDriver, random_prompt

CPU = torch.device("cpu")
NUM_TOKENS = 1600
SCHEDULED = ((1, 1), (1, 13), (1, 65), (1, 128), (9, 9), (5, 40), (1, 64), (300, 620), (1, 2))
"""(new tokens, keys): decodes first, then prompts, among them pieces of one token."""
HEADS = 6


def make_kv(config: ModelConfig, block_size: int, dtype: torch.dtype = torch.float32) -> KVCache:
    kv = KVCache(config, NUM_TOKENS // block_size, block_size, dtype, CPU)
    kv.data.copy_(torch.randn(kv.data.shape, generator=torch.Generator().manual_seed(4)))
    return kv


def build(rows: tuple[tuple[int, int], ...], block_size: int) -> BatchInput:
    """Over shuffled blocks; some tables have a block in hand."""
    free = random.Random(8).sample(range(NUM_TOKENS // block_size), NUM_TOKENS // block_size)
    parts = []
    for index, (num_new, keys) in enumerate(rows):
        num_blocks = -(-keys // block_size) + index % 2
        table = np.array([free.pop() for _ in range(num_blocks)], dtype=np.int64)
        parts.append(BatchRow(np.zeros(num_new, dtype=np.int64), keys - num_new, table, True))
    return BatchInput.build(parts, block_size, CPU)


def queries(batch: BatchInput, kv: KVCache) -> Tensor:
    """A view of wider rows, as the model's q is one of qkv."""
    shape = (len(batch.input_ids), HEADS + 4, kv.data.shape[-1])
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))[:, :HEADS]


def check(factory: AttentionFactory, batch: BatchInput, kv: KVCache, window: int | None) -> None:
    q = queries(batch, kv)
    step, reference = factory(batch, kv), GatherAttention(batch, kv)
    for layer in (0, 1):
        out, expected = step(layer, q, window), reference(layer, q, window)
        torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)


@pytest.fixture
def config(tiny_llama: TinyModel) -> ModelConfig:
    return ModelConfig.from_folder(tiny_llama.folder)


@pytest.fixture
def flashinfer() -> FlashInfer:
    return FlashInfer(FakeFlashInfer(), CPU)


@pytest.mark.parametrize("block_size", [1, 4, 16, 64])
@pytest.mark.parametrize("window", [None, 1, 4, 23, 280, 5000])
def test_it_attends_as_the_reference(
    config: ModelConfig, flashinfer: FlashInfer, block_size: int, window: int | None
) -> None:
    check(flashinfer, build(SCHEDULED[:6], block_size), make_kv(config, block_size), window)


@pytest.mark.parametrize(
    "rows",
    [SCHEDULED, SCHEDULED[::-1], SCHEDULED[:1], SCHEDULED[:4], SCHEDULED[4:6], SCHEDULED[7:]],
    ids=["decodes first", "backwards", "one token", "decodes", "prompts", "one of each, late"],
)
def test_rows_in_any_order(
    config: ModelConfig, flashinfer: FlashInfer, rows: tuple[tuple[int, int], ...]
) -> None:
    check(flashinfer, build(rows, 4), make_kv(config, 4), None)


def test_layers_share_a_plan_and_steps_share_wrappers(config: ModelConfig) -> None:
    """One plan a step, window and wrapper; steps take turns at two sets of wrappers."""
    library, kv = FakeFlashInfer(), make_kv(config, 4)
    flashinfer = FlashInfer(library, CPU)
    for num_steps in range(1, 6):
        batch = build(SCHEDULED[:5], 4)
        step, reference, q = flashinfer(batch, kv), GatherAttention(batch, kv), queries(batch, kv)
        for layer in (0, 1):
            for window in (None, 7):
                expected = reference(layer, q, window)
                torch.testing.assert_close(step(layer, q, window), expected, atol=1e-5, rtol=1e-5)
        assert library.num_plans == num_steps * 2 * 2
    assert library.num_wrappers == 2 * 2 * 2


def test_it_gives_what_the_dtype_can_hold(config: ModelConfig, flashinfer: FlashInfer) -> None:
    batch, kv = build(SCHEDULED[:6], 16), make_kv(config, 16, torch.bfloat16)
    q = queries(batch, kv).bfloat16()
    out, expected = flashinfer(batch, kv)(0, q, 23), GatherAttention(batch, kv)(0, q, 23)
    torch.testing.assert_close(out, expected, atol=0.02, rtol=0.02)


@pytest.mark.parametrize("block_size", [1, 4, 16, 64])
def test_tokens_are_those_of_the_reference(tiny_model: TinyModel, block_size: int) -> None:
    """Whole models, in random chunks, float32; windows and all."""
    config = ModelConfig.from_folder(tiny_model.folder)
    weights = read_weights(tiny_model.folder, config, torch.float32, CPU, ModelWeights.read)
    prompts = [random_prompt(length, seed=length) for length in (1, 5, 40)]
    ours, theirs = (
        ModelDriver(Model(config, weights, attention), config, torch.float32, CPU, block_size)
        for attention in (FlashInfer(FakeFlashInfer(), CPU), GatherAttention)
    )
    expected = theirs.generate(prompts, num_output=8, chunk_seed=5)
    assert ours.generate(prompts, num_output=8, chunk_seed=5) == expected


def test_rows_may_share_blocks(config: ModelConfig, flashinfer: FlashInfer) -> None:
    """A cached prefix, and samples of one prompt."""
    shared = np.arange(7, dtype=np.int64)
    parts = [
        BatchRow(np.zeros(1, dtype=np.int64), 29, np.append(shared, 20), True),
        BatchRow(np.zeros(1, dtype=np.int64), 28, np.append(shared, 21), True),
        BatchRow(np.zeros(6, dtype=np.int64), 28, np.append(shared, [22, 23]), True),
    ]
    check(flashinfer, BatchInput.build(parts, 4, CPU), make_kv(config, 4), None)


def test_windows_groups_and_sizes() -> None:
    assert WORKSPACE_NBYTES >= 128 << 20, "what FlashInfer asks for"
    assert INT_WORKSPACE_NBYTES == 8 << 20, "its own size"
    assert [window_left(window) for window in (None, 1, 24)] == [-1, 0, 23]
    assert [use_tensor_cores(heads, 2) for heads in (2, 4, 6, 8, 10)] == [
        *(False, False, False, True, True)
    ]
