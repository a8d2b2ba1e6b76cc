"""Attention of one token a sequence by torch alone, in steps that can be captured.

Every shape is fixed by the graph's, and nothing is decided on the host: block tables are padded to
so many blocks, and what lies behind a sequence's end is masked by lengths that the device knows.
So it reads a padded table's length of keys, whatever the sequences': FlashInfer does not, and is
for those who want speed. It needs no package.

With a window, only the blocks that the window can touch are gathered.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.attention import Attention, AttentionFactory
from engine.batch import BatchInput
from engine.cuda.shapes import Shape, batch_sizes, block_counts
from engine.kv_cache import KVCache

MAX_GATHERED_NBYTES = 1 << 30
"""Of K and V in one layer; steps that would gather more are not captured."""


class PaddedAttention:
    """Block tables at a fixed address. Engine thread only."""

    def __init__(self, kv: KVCache, max_num_seqs: int, max_blocks: int) -> None:
        token_nbytes = 2 * kv.data[0, 0, 0, 0].nbytes
        self.shapes: Sequence[Shape] = [
            Shape(num_seqs, num_blocks)
            for num_seqs in batch_sizes(max_num_seqs)
            for num_blocks in block_counts(max_blocks, kv.block_size)
            if num_seqs * num_blocks * kv.block_size * token_nbytes <= MAX_GATHERED_NBYTES
        ]
        self._scratch = kv.scratch_block
        width = max((shape.num_blocks for shape in self.shapes), default=0)
        self._tables = torch.full((max_num_seqs, width), self._scratch, device=kv.device)  # int64

    def load(self, shape: Shape, batch: BatchInput | None) -> None:
        """Before a replay; None: nothing but padding."""
        num_seqs = 0
        if batch is not None:
            num_seqs, width = batch.block_tables.shape
            width = min(width, shape.num_blocks)
            self._tables[:num_seqs, :width].copy_(batch.block_tables[:, :width])
        self._tables[num_seqs : shape.num_seqs, 0].fill_(self._scratch)

    def factory(self, shape: Shape) -> AttentionFactory:
        """For the step that is captured."""
        tables = self._tables[: shape.num_seqs, : shape.num_blocks]

        def attention(batch: BatchInput, kv: KVCache) -> Attention:
            return _PaddedStep(tables, batch.positions + 1, kv)

        return attention


@dataclass(frozen=True, slots=True)
class _Gather:
    """B sequences, S gathered slots each."""

    block_ids: Tensor  # [B * S / block_size]
    hidden: Tensor  # [B, S] slots that are none of the sequence's keys, or beyond the window
    mask: Tensor  # [B, 1, 1, S] additive

    def __call__(self, cache: Tensor) -> Tensor:
        """[num_blocks, block_size, kv_heads, d] → [B, kv_heads, S, d]"""
        gathered = cache.index_select(0, self.block_ids)
        gathered = gathered.view(*self.hidden.shape, *cache.shape[2:])
        # Another request's infinity must not reach a product.
        gathered.masked_fill_(self.hidden[:, :, None, None], 0)
        return gathered.transpose(1, 2)


class _PaddedStep:
    def __init__(self, tables: Tensor, seq_lens: Tensor, kv: KVCache) -> None:
        """tables [B, max_blocks], seq_lens [B]"""
        self._tables = tables
        self._seq_lens = seq_lens
        self._kv = kv
        self._gathers: dict[int | None, _Gather] = {}

    def __call__(self, layer: int, q: Tensor, window: int | None) -> Tensor:
        if window not in self._gathers:
            self._gathers[window] = self._gather(window, q.dtype)
        gather = self._gathers[window]
        k, v = self._kv.layer(layer)
        num_seqs, num_heads, head_dim = q.shape
        rows = q.view(num_seqs, k.shape[2], -1, head_dim)  # [B, kv_heads, group, d]
        attended = F.scaled_dot_product_attention(rows, gather(k), gather(v), gather.mask)
        return attended.reshape(num_seqs, num_heads, head_dim)

    def _gather(self, window: int | None, dtype: torch.dtype) -> _Gather:
        block_size, max_blocks = self._kv.block_size, self._tables.shape[1]
        ends = self._seq_lens.unsqueeze(1)  # [B, 1]
        num_blocks, first_keys = max_blocks, torch.zeros_like(ends)
        if window is not None:
            num_blocks = min(max_blocks, -(-(window - 1) // block_size) + 1)
            first_keys = (ends - window).clamp_(min=0)
        first_blocks = first_keys // block_size
        slots = torch.arange(num_blocks * block_size, device=ends.device)
        positions = first_blocks * block_size + slots  # [B, S]
        hidden = (positions < first_keys) | (positions >= ends)
        columns = first_blocks + torch.arange(num_blocks, device=ends.device)
        columns.clamp_(max=max_blocks - 1)  # beyond the table: hidden
        mask = torch.zeros(hidden.shape, dtype=dtype, device=ends.device)
        mask.masked_fill_(hidden, -torch.inf)
        return _Gather(
            block_ids=self._tables.gather(1, columns).flatten(),
            hidden=hidden,
            mask=mask[:, None, None],
        )
