"""Attention of a ragged batch over paged KV: the interface, and the reference on torch's SDPA.

An `Attention` belongs to one step: it is built from the batch before the first layer, when it
works out indices and masks once, and is then called once a layer, after that layer's new K and V
were written to the cache.

The reference gathers each sequence's blocks; query heads that share a KV head (GQA) share it in
place, without a repeated K or V. Sequences with one new token go together, padded and masked;
they are grouped by a rounded length that depends on nothing but their own, so that a row's
arithmetic is the same whatever else is in the batch. Longer queries go one sequence at a time, in
tiles that see no key beyond their last row.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.batch import BatchInput
from engine.host_copy import copy_to_device
from engine.kv_cache import KVCache

_TILE = 256
"""Query rows of one SDPA call; bounds the mask and the work wasted above the diagonal."""


class Attention(Protocol):
    """One step's attention."""

    def __call__(self, layer: int, q: Tensor, window: int | None) -> Tensor:
        """q [T, heads, head_dim], rotated → [T, heads, head_dim]. A token sees its sequence up to
        itself, or the last `window` tokens of that."""
        ...


AttentionFactory = Callable[[BatchInput, KVCache], Attention]


class GatherAttention:
    """The reference; see the module. Runs on any device, in any dtype."""

    def __init__(self, batch: BatchInput, kv: KVCache) -> None:
        self._batch = batch
        self._kv = kv
        self._plans: dict[int | None, list[_DecodeGroup | _PrefillRow]] = {}

    def __call__(self, layer: int, q: Tensor, window: int | None) -> Tensor:
        if window not in self._plans:
            self._plans[window] = _plan(self._batch, self._kv.block_size, window, q.dtype)
        out = torch.empty_like(q)
        k, v = self._kv.layer(layer)
        for part in self._plans[window]:
            part.attend(q, k, v, out)
        return out


@dataclass(frozen=True, slots=True)
class _DecodeGroup:
    """D sequences with one new token each, padded to S = blocks * block_size keys."""

    tokens: Tensor  # [D] rows of the batch
    block_ids: Tensor  # [D * blocks]
    mask: Tensor  # [D, 1, 1, S] additive
    padding: Tensor  # [P] of the D * S gathered slots: those without a token of their sequence

    def attend(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        _, num_heads, head_dim = q.shape
        num_kv_heads = k.shape[2]
        rows = q[self.tokens].view(-1, num_kv_heads, num_heads // num_kv_heads, head_dim)
        keys, values = self._gather(k), self._gather(v)  # [D, kv_heads, S, head_dim]
        attended = F.scaled_dot_product_attention(rows, keys, values, self.mask)
        out[self.tokens] = attended.reshape(-1, num_heads, head_dim)

    def _gather(self, cache: Tensor) -> Tensor:
        gathered = cache.index_select(0, self.block_ids).flatten(0, 1)  # [D * S, kv_heads, d]
        # What is left in a slot, another request's infinity say, must not reach a product.
        gathered.index_fill_(0, self.padding, 0)
        return gathered.view(-1, self.mask.shape[-1], *cache.shape[2:]).transpose(1, 2)


@dataclass(frozen=True, slots=True)
class _Tile:
    rows: slice  # of the batch
    keys: slice  # of the gathered sequence
    mask: Tensor  # [rows, keys] additive


@dataclass(frozen=True, slots=True)
class _PrefillRow:
    """One sequence with several new tokens."""

    block_ids: Tensor  # [blocks]
    tiles: tuple[_Tile, ...]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        num_kv_heads = k.shape[2]
        group = q.shape[1] // num_kv_heads
        rows = q.view(-1, num_kv_heads, group, q.shape[2]).permute(
            1, 2, 0, 3
        )  # [kv_heads, group, T, d]
        keys, values = (
            cache.index_select(0, self.block_ids).flatten(0, 1).transpose(0, 1).unsqueeze(1)
            for cache in (k, v)
        )  # [kv_heads, 1, S, d]
        for tile in self.tiles:
            attended = F.scaled_dot_product_attention(
                rows[:, :, tile.rows],
                keys[:, :, tile.keys].expand(-1, group, -1, -1),
                values[:, :, tile.keys].expand(-1, group, -1, -1),
                tile.mask,
            )
            out[tile.rows] = attended.permute(2, 0, 1, 3).flatten(1, 2)


def _plan(
    batch: BatchInput, block_size: int, window: int | None, dtype: torch.dtype
) -> list[_DecodeGroup | _PrefillRow]:
    plan: list[_DecodeGroup | _PrefillRow] = []
    groups: defaultdict[int, list[_Span]] = defaultdict(list)
    start = 0
    for row, (num_new, seq_len) in enumerate(
        zip(batch.seqlens_q_host, batch.seq_lens_host, strict=True)
    ):
        span = _Span.of(row, start, num_new, seq_len, window, block_size)
        if num_new == 1:
            groups[_round_up(span.num_blocks)].append(span)
        else:
            plan.append(_plan_prefill(batch, span, window, dtype))
        start += num_new
    for num_blocks, spans in groups.items():
        plan.append(_plan_decode(batch, spans, num_blocks, window, dtype))
    return plan


@dataclass(frozen=True, slots=True)
class _Span:
    """The keys one sequence of the batch needs, in whole blocks."""

    row: int
    """of the block tables"""
    start: int
    """first row of the batch's tokens"""
    num_new: int
    seq_len: int
    first_block: int
    num_blocks: int
    block_size: int

    @classmethod
    def of(
        cls, row: int, start: int, num_new: int, seq_len: int, window: int | None, block_size: int
    ) -> "_Span":
        first_key = 0 if window is None else max(0, seq_len - num_new + 1 - window)
        first_block = first_key // block_size
        num_blocks = -(-seq_len // block_size) - first_block
        return cls(row, start, num_new, seq_len, first_block, num_blocks, block_size)

    @property
    def first_key(self) -> int:
        """Position of the first gathered key."""
        return self.first_block * self.block_size


def _round_up(num_blocks: int) -> int:
    """To three significant bits: few groups, and at most a quarter of padding."""
    step = 1 << max(0, num_blocks.bit_length() - 3)
    return -(-num_blocks // step) * step


def _plan_decode(
    batch: BatchInput,
    spans: list[_Span],
    num_blocks: int,
    window: int | None,
    dtype: torch.dtype,
) -> _DecodeGroup:
    device, block_size = batch.block_tables.device, spans[0].block_size
    num_keys = num_blocks * block_size
    rows = np.array([span.row for span in spans])  # [D], as the next three
    first_blocks = np.array([span.first_block for span in spans])
    seq_lens = np.array([span.seq_len for span in spans])
    starts = np.array([span.start for span in spans])
    first_keys = first_blocks * block_size
    columns = first_blocks[:, None] + np.arange(num_blocks)
    columns = columns.clip(max=batch.block_tables_host.shape[1] - 1)  # beyond it: padding anyway
    block_ids = batch.block_tables_host[rows[:, None], columns]
    padding = np.flatnonzero(np.arange(num_keys) >= (seq_lens - first_keys)[:, None])
    tokens, block_ids_d, ends, first, padding_d = copy_to_device(
        (starts, block_ids, seq_lens, first_keys, padding), device
    ).device
    positions = first.unsqueeze(1) + torch.arange(num_keys, device=device)  # [D, S]
    hidden = positions >= ends.unsqueeze(1)
    if window is not None:
        hidden |= positions < ends.unsqueeze(1) - window
    return _DecodeGroup(
        tokens=tokens,
        block_ids=block_ids_d,
        mask=_additive(hidden, dtype).view(len(spans), 1, 1, num_keys),
        padding=padding_d,
    )


def _plan_prefill(
    batch: BatchInput, span: _Span, window: int | None, dtype: torch.dtype
) -> _PrefillRow:
    device = batch.block_tables.device
    blocks = slice(span.first_block, span.first_block + span.num_blocks)
    computed = span.seq_len - span.num_new
    tiles = []
    for first in range(0, span.num_new, _TILE):
        last = min(first + _TILE, span.num_new)
        begin = computed + first
        first_key = 0 if window is None else max(0, begin + 1 - window)
        q_positions = torch.arange(begin, computed + last, device=device).unsqueeze(1)
        k_positions = torch.arange(first_key, computed + last, device=device)
        hidden = k_positions > q_positions
        if window is not None:
            hidden |= k_positions <= q_positions - window
        tiles.append(
            _Tile(
                rows=slice(span.start + first, span.start + last),
                keys=slice(first_key - span.first_key, computed + last - span.first_key),
                mask=_additive(hidden, dtype),
            )
        )
    return _PrefillRow(batch.block_tables[span.row, blocks], tuple(tiles))


def _additive(hidden: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(
        hidden, float("-inf")
    )
