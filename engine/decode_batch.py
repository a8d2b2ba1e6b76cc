"""The batch of a step in which every sequence computes one token and takes one, on the host.

Most steps are like that, and their sequences are mostly those of the step before: constants are
kept by the number of sequences, block tables from step to step, and the few numbers that differ
are gathered in Python and become arrays at once. What `PackedBatch` makes of the same rows is
equal, but for a device it also packs them for the way there. Knows no model. Engine thread only.
"""

from collections.abc import Sequence as Rows
from functools import cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.batch import BatchInput
from engine.request import BlockId
from engine.sequence import Sequence

_Tables = npt.NDArray[np.int64]


class DecodeBatches:
    """See the module. A batch is good until the next is built."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._tables: _Tables = np.empty((0, 0), dtype=np.int64)
        self._tensor = torch.from_numpy(self._tables)
        self._kept: list[tuple[list[BlockId], int]] = []  # whose rows these are, and how long

    def build(self, seqs: Rows[Sequence]) -> BatchInput | None:
        """None: it is another kind of step. None of these sequences can have prompt tokens to tell
        of."""
        for seq in seqs:
            if seq.num_scheduled_tokens != 1 or not seq.samples_next:
                return None
        num, size = len(seqs), self._block_size
        positions = [seq.num_computed_tokens for seq in seqs]
        seq_lens = [position + 1 for position in positions]
        slots = [
            seq.block_table[position // size] * size + position % size
            for seq, position in zip(seqs, positions, strict=True)
        ]
        token_ids = [seq.token_ids[position] for seq, position in zip(seqs, positions, strict=True)]
        numbers = np.array((token_ids, positions, slots), dtype=np.int64)
        self._keep_tables(seqs)
        always = _constants(num)
        return BatchInput(
            input_ids=torch.from_numpy(numbers[0]),
            positions=torch.from_numpy(numbers[1]),
            slot_mapping=torch.from_numpy(numbers[2]),
            block_tables=self._tensor,
            cu_seqlens_q=always.cu_seqlens_q,
            seq_lens=torch.from_numpy(np.array(seq_lens, dtype=np.int32)),
            seqlens_q_host=always.seqlens_q_host,
            seq_lens_host=tuple(seq_lens),
            block_tables_host=self._tables,
            logits_indices=always.logits_indices,
            prompt_indices=always.nothing,
            prompt_token_ids=always.nothing,
        )

    def _keep_tables(self, seqs: Rows[Sequence]) -> None:
        """A sequence's table is a new list after it was given up, and else only grows."""
        kept = self._kept
        width = max(len(seq.block_table) for seq in seqs)
        if self._tables.shape != (len(seqs), width):
            self._tables = np.zeros((len(seqs), width), dtype=np.int64)
            self._tensor = torch.from_numpy(self._tables)
            kept = self._kept = [([], -1)] * len(seqs)
        for index, seq in enumerate(seqs):
            table, num = seq.block_table, len(seq.block_table)
            before, num_before = kept[index]
            if before is not table or num_before != num:
                row = self._tables[index]
                row[:num] = seq.block_ids()
                row[num:] = 0
                kept[index] = table, num


class _Constants(NamedTuple):
    cu_seqlens_q: Tensor
    seqlens_q_host: tuple[int, ...]
    logits_indices: Tensor
    nothing: Tensor


@cache
def _constants(num_seqs: int) -> _Constants:
    """Of so many sequences of one new token; read only."""
    return _Constants(
        torch.arange(num_seqs + 1, dtype=torch.int32),
        (1,) * num_seqs,
        torch.arange(num_seqs),
        torch.empty(0, dtype=torch.int64),
    )
