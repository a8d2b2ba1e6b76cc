"""The tensors of one step: built on the host in one buffer, moved to the device by one copy.

Knows block tables and token ids, no scheduler and no model. T new tokens of B sequences are
ragged: sequence b owns rows [cu_seqlens_q[b], cu_seqlens_q[b + 1]) of every [T] tensor.
"""

from collections.abc import Sequence as Rows
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_Array = TypeVar("_Array", Tensor, npt.NDArray[np.int64])
_NO_IDS: npt.NDArray[np.int64] = np.empty(0, dtype=np.int64)


class BatchRow(NamedTuple):
    """One sequence's part of a step."""

    token_ids: npt.NDArray[np.int64]
    """[n] new tokens, at positions [num_computed_tokens, num_computed_tokens + n)."""
    num_computed_tokens: int
    block_ids: npt.NDArray[np.int64]
    """[blocks] the block table; covers the new tokens."""
    wants_logits: bool
    """The logits of the last new token are wanted."""
    prompt_rows: range = range(0)
    """Offsets of the new tokens that are to say how likely the prompt token behind them was."""
    next_token_ids: npt.NDArray[np.int64] = _NO_IDS
    """[len(prompt_rows)] those prompt tokens."""


@dataclass(frozen=True, slots=True)
class BatchInput:
    """See the module. All tensors lie on the model's device."""

    input_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    slot_mapping: Tensor  # [T] int64: block_id * block_size + offset
    block_tables: Tensor  # [B, max_blocks] int64, padded with 0
    cu_seqlens_q: Tensor  # [B + 1] int32
    seq_lens: Tensor  # [B] int32: keys each sequence attends to, its new tokens included
    seqlens_q_host: tuple[int, ...]  # [B], on the host: no kernel launch needs a device sync
    seq_lens_host: tuple[int, ...]  # [B]
    block_tables_host: npt.NDArray[np.int64]  # [B, max_blocks], read only
    logits_indices: Tensor  # [L] int64: rows of T whose logits are wanted, in batch order
    prompt_indices: Tensor  # [P] int64: rows of T that say how likely a prompt token was
    prompt_token_ids: Tensor  # [P] int64: that token

    @classmethod
    def build(cls, rows: Rows[BatchRow], block_size: int, device: torch.device) -> "BatchInput":
        """Rows in batch order, none empty."""
        return PackedBatch.of(rows, block_size, pinned=device.type == "cuda").to(device)


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """A step's tensors as one host buffer: what goes to the device, and to other ranks."""

    host: Tensor  # [words] int64: the parts of BatchInput, one behind the other
    num_rows: int  # B
    num_tokens: int  # T
    max_blocks: int
    num_logits: int  # L
    num_prompts: int  # P

    @classmethod
    def of(cls, rows: Rows[BatchRow], block_size: int, pinned: bool = False) -> "PackedBatch":
        """Rows in batch order, none empty."""
        assert rows, "a step computes something"
        seqlens_q = tuple(len(row.token_ids) for row in rows)
        seq_lens = tuple(
            row.num_computed_tokens + n for row, n in zip(rows, seqlens_q, strict=True)
        )
        cu_seqlens = (0, *accumulate(seqlens_q))
        logits_rows = [
            end - 1 for row, end in zip(rows, cu_seqlens[1:], strict=True) if row.wants_logits
        ]
        prompt_rows = _prompt_rows(rows, cu_seqlens)
        num_rows, num_tokens = len(rows), cu_seqlens[-1]
        max_blocks = max(len(row.block_ids) for row in rows)
        counts = (num_rows, num_tokens, max_blocks, len(logits_rows), len(prompt_rows))
        sizes = _sizes(*counts)

        host = _pinned(sum(sizes)) if pinned else torch.from_numpy(np.empty(sum(sizes), np.int64))
        parts = _split(host.numpy(), sizes)  # host memory
        input_ids, positions, slot_mapping, flat_tables, logits_indices, *prompts, words = parts

        tables = flat_tables.reshape(num_rows, max_blocks)
        tables.fill(0)
        for table, row in zip(tables, rows, strict=True):
            table[: len(row.block_ids)] = row.block_ids
        np.concatenate([row.token_ids for row in rows], out=input_ids)
        row_of_token = np.repeat(np.arange(num_rows), seqlens_q)
        first_positions = np.subtract(seq_lens, cu_seqlens[1:])  # position of batch row 0, if ours
        np.add(np.arange(num_tokens), first_positions[row_of_token], out=positions)
        blocks, offsets = np.divmod(positions, block_size)
        np.add(tables[row_of_token, blocks] * block_size, offsets, out=slot_mapping)
        logits_indices[:] = logits_rows
        if prompt_rows:
            prompts[0][:] = prompt_rows
            np.concatenate([row.next_token_ids for row in rows], out=prompts[1])
        words.view(np.int32)[: 2 * num_rows + 1] = (*cu_seqlens, *seq_lens)
        return cls(host, *counts)

    def to(self, device: torch.device) -> BatchInput:
        """By one copy, if it is another."""
        num_rows = self.num_rows
        sizes = _sizes(
            num_rows, self.num_tokens, self.max_blocks, self.num_logits, self.num_prompts
        )
        num_int32 = 2 * num_rows + 1
        parts = _split(self.host.numpy(), sizes)  # host memory
        tables = parts[3].reshape(num_rows, self.max_blocks)
        int32 = parts[7].view(np.int32)[:num_int32]
        if device.type == "cpu":
            # Unlike torch's slices and views, numpy's keep the GIL: whoever waits for it, with the
            # last step's tokens, gets it when the model computes.
            starts, lens = int32[: num_rows + 1], int32[num_rows + 1 :]
            arrays = (*parts[:3], tables, *parts[4:7], starts, lens)
            dev = [torch.from_numpy(array) for array in arrays]
        else:
            dev = _split(self.host.to(device, non_blocking=True), sizes)
            dev[3] = dev[3].view(num_rows, self.max_blocks)
            words = dev[7].view(torch.int32)
            dev[7:] = [words[: num_rows + 1], words[num_rows + 1 : num_int32]]
        return BatchInput(
            input_ids=dev[0],
            positions=dev[1],
            slot_mapping=dev[2],
            block_tables=dev[3],
            cu_seqlens_q=dev[7],
            seq_lens=dev[8],
            seqlens_q_host=tuple(np.diff(int32[: num_rows + 1]).tolist()),  # host memory
            seq_lens_host=tuple(int32[num_rows + 1 :].tolist()),  # host memory
            block_tables_host=tables,
            logits_indices=dev[4],
            prompt_indices=dev[5],
            prompt_token_ids=dev[6],
        )


def no_host_data(input_ids: Tensor, positions: Tensor, slot_mapping: Tensor) -> BatchInput:
    """Sequences of one token each, [T] tensors, that all want logits, for a step that is captured:
    the host knows neither lengths nor block tables, so nothing can depend on them."""
    num_rows, device = len(input_ids), input_ids.device
    return BatchInput(
        input_ids=input_ids,
        positions=positions,
        slot_mapping=slot_mapping,
        block_tables=torch.empty((num_rows, 0), dtype=torch.int64, device=device),
        cu_seqlens_q=torch.arange(num_rows + 1, dtype=torch.int32, device=device),
        seq_lens=torch.empty(0, dtype=torch.int32, device=device),
        seqlens_q_host=(),
        seq_lens_host=(),
        block_tables_host=np.empty((num_rows, 0), dtype=np.int64),
        logits_indices=torch.arange(num_rows, device=device),
        prompt_indices=torch.empty(0, dtype=torch.int64, device=device),
        prompt_token_ids=torch.empty(0, dtype=torch.int64, device=device),
    )


def _sizes(
    num_rows: int, num_tokens: int, max_blocks: int, num_logits: int, num_prompts: int
) -> tuple[int, ...]:
    """Words of each part; the last one has the int32 parts."""
    return (
        *(num_tokens, num_tokens, num_tokens, num_rows * max_blocks, num_logits),
        *(num_prompts, num_prompts, num_rows + 1),
    )


def _pinned(num_words: int) -> Tensor:
    """The caching host allocator reuses it only after the copies that read it."""
    return torch.empty(num_words, dtype=torch.int64, pin_memory=True)


def _prompt_rows(rows: Rows[BatchRow], cu_seqlens: Rows[int]) -> list[int]:
    starts = zip(rows, cu_seqlens, strict=False)
    return [start + offset for row, start in starts for offset in row.prompt_rows]


def _split(packed: _Array, sizes: Rows[int]) -> list[_Array]:
    ends = accumulate(sizes)
    return [packed[end - size : end] for size, end in zip(sizes, ends, strict=True)]
