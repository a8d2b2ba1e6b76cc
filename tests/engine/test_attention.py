"""The reference attention against a plain one in float64, and what must not leak between rows."""

import random

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.attention import GatherAttention
from engine.batch import BatchInput, BatchRow
from engine.config import ModelConfig
from engine.kv_cache import KVCache
from tests.engine.conftest import TinyModel

CPU = torch.device("cpu")
BLOCK_SIZE = 4
NUM_BLOCKS = 400
ROWS = ((1, 1), (1, 13), (1, 65), (1, 70), (1, 3), (9, 9), (5, 40), (300, 620), (1, 64))
"""(new tokens, keys) of each sequence: single tokens of many lengths, chunks, several tiles."""


@pytest.fixture
def kv(tiny_llama: TinyModel) -> KVCache:
    config = ModelConfig.from_folder(tiny_llama.folder)
    cache = KVCache(config, NUM_BLOCKS, BLOCK_SIZE, torch.float32, CPU)
    cache.data.copy_(torch.randn(cache.data.shape, generator=torch.Generator().manual_seed(4)))
    return cache


def block_tables() -> list[list[int]]:
    """Disjoint, shuffled."""
    free = random.Random(8).sample(range(NUM_BLOCKS), NUM_BLOCKS)
    return [[free.pop() for _ in range(-(-keys // BLOCK_SIZE))] for _, keys in ROWS]


def build(rows: list[int]) -> BatchInput:
    tables = block_tables()
    parts = []
    for row in rows:
        num_new, keys = ROWS[row]
        table = np.array(tables[row], dtype=np.int64)
        parts.append(BatchRow(np.zeros(num_new, dtype=np.int64), keys - num_new, table, True))
    return BatchInput.build(parts, BLOCK_SIZE, CPU)


def queries(kv: KVCache, row: int) -> Tensor:
    heads, head_dim = 6, kv.data.shape[-1]
    generator = torch.Generator().manual_seed(row)
    return torch.randn((ROWS[row][0], heads, head_dim), generator=generator)


def attend(kv: KVCache, rows: list[int], window: int | None) -> list[Tensor]:
    q = torch.cat([queries(kv, row) for row in rows])
    out = GatherAttention(build(rows), kv)(1, q, window)
    return list(out.split_with_sizes([ROWS[row][0] for row in rows]))


def expected(kv: KVCache, row: int, window: int | None) -> Tensor:
    num_new, num_keys = ROWS[row]
    table = block_tables()[row]
    k, v = (cache[table].flatten(0, 1)[:num_keys].double() for cache in kv.layer(1))
    q = queries(kv, row).double()
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) / q.shape[2] ** 0.5
    positions, keys = torch.arange(num_keys - num_new, num_keys)[:, None], torch.arange(num_keys)
    hidden = keys > positions
    if window is not None:
        hidden = hidden | (keys <= positions - window)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)


@pytest.mark.parametrize("window", [None, 1, 4, 23, 280, 5000])
def test_every_row_attends_to_its_own_keys(kv: KVCache, window: int | None) -> None:
    rows = list(range(len(ROWS)))
    for row, out in zip(rows, attend(kv, rows, window), strict=True):
        torch.testing.assert_close(out.double(), expected(kv, row, window), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("window", [None, 23])
def test_rows_do_not_depend_on_the_batch(kv: KVCache, window: int | None) -> None:
    """Bit for bit."""
    rows = list(range(len(ROWS)))
    for row, out in zip(rows, attend(kv, rows, window), strict=True):
        assert torch.equal(attend(kv, [row], window)[0], out)


@pytest.mark.parametrize("window", [None, 23])
def test_stale_slots_do_not_leak(kv: KVCache, window: int | None) -> None:
    """Not even as a NaN times a zero probability."""
    rows = list(range(len(ROWS)))
    before = attend(kv, rows, window)
    used = torch.zeros(NUM_BLOCKS * BLOCK_SIZE, dtype=torch.bool)
    for (_, keys), table in zip(ROWS, block_tables(), strict=True):
        slots = torch.tensor(table)[:, None] * BLOCK_SIZE + torch.arange(BLOCK_SIZE)
        used[slots.flatten()[:keys]] = True
    kv.data.flatten(2, 3)[:, :, ~used] = torch.nan
    for stale, out in zip(before, attend(kv, rows, window), strict=True):
        assert torch.equal(stale, out)
