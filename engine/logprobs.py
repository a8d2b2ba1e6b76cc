"""How likely tokens were: what a step tells beside the tokens, on the same copy to the host.

Logprobs are of the model's own distribution, as vLLM's default has them (`raw_logprobs`): before
masks, bias, penalties, temperature and filters. No row depends on another.
"""

from collections.abc import Sequence as Rows
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.request import MAX_TOP_LOGPROBS, TokenLogprobs


class LogprobTable(Protocol):
    def __call__(self, logits: Tensor, token_ids: Tensor, *, has_top: bool) -> Tensor: ...


class StepLogprobs:
    """The logprobs of one step's rows: `pack`, one copy to the host, `unpack`."""

    def __init__(
        self, logits: Tensor, counts: Rows[int], table: LogprobTable | None = None
    ) -> None:
        """logits: [L, vocab] float32, as the model gave them. counts: [L] as
        `SamplingParams.num_logprobs`. `table`: what makes it; None: `logprob_table`."""
        self._table = table or logprob_table
        self._logits = logits
        self._counts = counts
        self._wanted = [row for row, count in enumerate(counts) if count]
        self._has_top = any(count > 1 for count in counts)

    def pack(self, token_ids: Tensor) -> Tensor:
        """token_ids: [L] int64, the tokens chosen. → themselves if nobody wants logprobs; else
        [L + n] int32: they, and what `unpack` reads."""
        if not self._wanted:
            return token_ids
        logits, chosen = self._logits, token_ids
        if len(self._wanted) < len(self._counts):
            rows = _indices(self._wanted, logits.device)
            logits, chosen = logits[rows], chosen[rows]
        table = self._table(logits, chosen, has_top=self._has_top)
        return torch.cat((token_ids.int(), table.flatten()))

    def unpack(self, read: npt.NDArray[np.int32]) -> list[TokenLogprobs | None]:
        """`read`: what `pack` gave, on the host. Empty if nobody wants logprobs."""
        if not self._wanted:
            return []
        told: list[TokenLogprobs | None] = [None] * len(self._counts)
        table = read[len(told) :].reshape(len(self._wanted), -1)
        counts = [self._counts[row] for row in self._wanted]
        for row, entry in zip(self._wanted, read_table(table, counts), strict=True):
            told[row] = entry
        return told


def logprob_table(logits: Tensor, token_ids: Tensor, *, has_top: bool) -> Tensor:
    """logits [R, vocab] float32, token_ids [R] int64 → [R, 2 + 2k] int32: the token's logprob
    (the bits of a float32), its rank, k token ids, their logprobs.

    k is always the same: how equal logits are ordered must not depend on other rows' wishes."""
    total = logits.logsumexp(dim=-1, keepdim=True)
    chosen = logits.gather(1, token_ids.unsqueeze(1))
    columns = [(chosen - total).view(torch.int32), _ranks(logits, chosen)]
    if has_top:
        top = logits.topk(min(MAX_TOP_LOGPROBS, logits.shape[1]), dim=-1)
        columns += [top.indices.int(), (top.values - total).view(torch.int32)]
    return torch.cat(columns, dim=1)


def _ranks(logits: Tensor, chosen: Tensor) -> Tensor:
    """logits [R, vocab], chosen [R, 1] → [R, 1] int32: 1 + how many are larger."""
    if logits.device.type == "cpu":  # numpy is four times faster there
        rows = zip(logits.numpy(), chosen.numpy(), strict=True)  # host memory
        counts = [np.count_nonzero(row > value) for row, value in rows]
        return torch.tensor(counts, dtype=torch.int32).unsqueeze(1) + 1
    return (logits > chosen).sum(dim=-1, keepdim=True, dtype=torch.int32) + 1


def read_table(table: npt.NDArray[np.int32], counts: Rows[int]) -> list[TokenLogprobs]:
    """table: [R, 2 + 2k] on the host; counts: [R] as `SamplingParams.num_logprobs`."""
    num_top = (table.shape[1] - 2) // 2
    ranks = table[:, 1].tolist()  # host memory, as all of these
    top_ids = table[:, 2 : 2 + num_top].tolist()  # host memory
    own = table[:, 0].view(np.float32).tolist()  # host memory
    tops = np.ascontiguousarray(table[:, 2 + num_top :]).view(np.float32)
    top_values = tops.tolist()  # host memory
    return [
        TokenLogprobs(own[row], ranks[row], *_first(count - 1, top_ids[row], top_values[row]))
        for row, count in enumerate(counts)
    ]


def _first(
    count: int, token_ids: Rows[int], logprobs: Rows[float]
) -> tuple[tuple[int, ...], tuple[float, ...]]:
    return tuple(token_ids[:count]), tuple(logprobs[:count])


def _indices(rows: Rows[int], device: torch.device) -> Tensor:
    return torch.tensor(rows, pin_memory=device.type == "cuda").to(device, non_blocking=True)
