"""A batch as plain arrays: who attends how, in which items."""

import numpy as np
import numpy.typing as npt

from engine.batch import BatchInput
from engine.cpu.layout import KEYS, Ints, Shape, Step
from engine.cpu.tile import TILE

_NO_ITEMS: Ints = np.empty((0, 2), dtype=np.int64)


def plan_step(batch: BatchInput, shape: Shape, inv_freq: npt.NDArray[np.float32]) -> Step:
    """The batch's arrays, in place where they are on the host already."""
    seqlens_q = np.array(batch.seqlens_q_host, dtype=np.int64)
    seq_lens = np.array(batch.seq_lens_host, dtype=np.int64)
    packed = np.flatnonzero(seqlens_q > 1)
    blocks = -(-seq_lens[packed] // KEYS)
    strides = blocks * (KEYS * shape.head_dim)
    sizes = strides * shape.kv_heads
    rows = seqlens_q[packed] * (shape.heads // shape.kv_heads)
    positions = batch.positions.numpy()  # host memory, as the rest
    angles = positions.astype(np.float32)[:, None] * inv_freq
    return Step(
        input_ids=batch.input_ids.numpy(),
        slots=batch.slot_mapping.numpy(),
        cos=np.cos(angles),
        sin=np.sin(angles),
        block_tables=batch.block_tables.numpy(),
        first_rows=np.concatenate((_ZERO, np.cumsum(seqlens_q))),
        seq_lens=seq_lens,
        logits_rows=batch.logits_indices.numpy(),
        lone=np.flatnonzero(seqlens_q == 1),
        packed=packed,
        pack_items=_items(blocks, 1),
        tile_items=_items(rows, TILE),
        packed_at=np.cumsum(sizes) - sizes,
        packed_stride=strides,
    )


_ZERO: Ints = np.zeros(1, dtype=np.int64)


def _items(counts: Ints, step: int) -> Ints:
    """[num, 2]: (index, first) for 0, step, 2 step, ... < counts[index]"""
    if not len(counts):
        return _NO_ITEMS
    return np.concatenate(
        [
            np.stack((np.full(-(-count // step), index), np.arange(0, count, step)), axis=1)
            for index, count in enumerate(counts.tolist())
        ]
    )
