"""How likely prompt tokens were, of the sequences of a step that want to be told.

A chunk's logits would be [tokens, vocab]: they are made and read a few rows at a time, and only
each row's few numbers stay. They reach the host on the copy that brings the sampled tokens.
"""

from collections.abc import Callable
from collections.abc import Sequence as Rows

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.batch import BatchInput
from engine.logprobs import logprob_table, read_table
from engine.request import PromptLogprobs
from engine.sequence import Sequence

ROWS_AT_A_TIME = 64


class PromptLogprobsRows:
    """Of one step: `pack`, one copy to the host, `unpack`; all before its sequences move on."""

    def __init__(self, seqs: Rows[Sequence]) -> None:
        told = ((seq, seq.told_prompt_rows()) for seq in seqs)
        self._told = [(seq, rows) for seq, rows in told if rows]
        self.num_rows = sum(len(rows) for _, rows in self._told)
        self._has_top = any(_count(seq) > 1 for seq, _ in self._told)
        self.num_words = 0
        """Of what `pack` gave."""

    def pack(self, logits_of: Callable[[slice], Tensor], batch: BatchInput) -> Tensor:
        """[num_words] int32. `logits_of`: n of `batch.prompt_indices` → [n, vocab]."""
        tables = []
        for first in range(0, self.num_rows, ROWS_AT_A_TIME):
            part = slice(first, min(first + ROWS_AT_A_TIME, self.num_rows))
            tables.append(
                logprob_table(logits_of(part), batch.prompt_token_ids[part], has_top=self._has_top)
            )
        packed = torch.cat(tables).flatten()
        self.num_words = len(packed)
        return packed

    def unpack(self, read: npt.NDArray[np.int32]) -> list[PromptLogprobs]:
        """`read`: what `pack` gave, on the host."""
        if not self._told:
            return []
        table = read.reshape(self.num_rows, -1)
        events, done = [], 0
        for seq, rows in self._told:
            part = table[done : done + len(rows)]
            done += len(rows)
            first_index = seq.num_computed_tokens + rows.start + 1
            entries = tuple(read_table(part, [_count(seq)] * len(rows)))
            events.append(PromptLogprobs(seq.request_id, first_index, entries))
        return events


def _count(seq: Sequence) -> int:
    return seq.request.sampling.num_prompt_logprobs
