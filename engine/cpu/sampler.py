"""A `Sampler` of kernels: choose.py and tell.py over all rows of a step, by the team of threads.

Engine thread only. A step's wishes become plain arrays here; rows are shared out among the threads
if there are enough of them to be worth waking one.
"""

import math
from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.cpu.adjust import Changes, Int32s
from engine.cpu.choose import SCRATCH_ROWS, Wishes, choose, padded
from engine.cpu.layout import Floats, Ints
from engine.cpu.sync import new_counters
from engine.cpu.team import Team
from engine.cpu.tell import tell
from engine.logit_processors import Asked, Cells, RowRules, asked
from engine.request import MAX_TOP_LOGPROBS, SamplingParams
from engine.sampler import SampleRow, noise_counters

_Cells = tuple[int, Ints, tuple[Floats]]
_FEW = 3  # rows that are done sooner than another thread wakes up


class KernelSampler:
    """See the module. Compiles, if that was not done before on this machine."""

    def __init__(self, vocab_size: int, team: Team) -> None:
        self._vocab_size = vocab_size
        self._team = team
        size = (team.num_threads, padded(vocab_size))
        self._floats: Floats = np.zeros((size[0], SCRATCH_ROWS, size[1]), dtype=np.float32)
        self._ids: Int32s = np.zeros(size, dtype=np.int32)
        self._last = _Fixed.of([])
        logits = torch.zeros(1, vocab_size)
        self.sample_tokens(logits, [SampleRow(SamplingParams(max_tokens=1, temperature=1.0), 0, 0)])
        self.logprob_table(logits, torch.zeros(1, dtype=torch.int64), has_top=True)

    def sample_tokens(self, logits: Tensor, rows: Sequence[SampleRow]) -> Tensor:
        """As sampler.sample_tokens."""
        values = np.ascontiguousarray(logits.numpy())  # host memory
        fixed = self._fixed(rows)
        changes = self._changes(rows, fixed)
        if changes is None and fixed.are_greedy:
            return torch.from_numpy(values.argmax(axis=-1))
        wishes = Wishes(fixed.numbers, noise_counters(rows))
        changes = changes or _no_changes(len(rows))
        out: Ints = np.empty(len(rows), dtype=np.int64)
        counters, scratch = self._counters(), (self._floats, self._ids)
        self._run(partial(_choose, counters, values, wishes, changes, *scratch, out), len(rows))
        return torch.from_numpy(out)

    def _fixed(self, rows: Sequence[SampleRow]) -> "_Fixed":
        params = [row.params for row in rows]
        if params != self._last.params:
            self._last = _Fixed.of(params)
        return self._last

    def _changes(self, rows: Sequence[SampleRow], fixed: "_Fixed") -> Changes | None:
        """None: nobody asks for any."""
        for row in rows:
            if row.rules is not None or row.grammar is not None:
                break
        else:
            return None
        wanted = asked([RowRules(row.rules, row.grammar) for row in rows], self._vocab_size)
        return changes_of(wanted, fixed.penalties, self._vocab_size)

    def logprob_table(self, logits: Tensor, token_ids: Tensor, *, has_top: bool) -> Tensor:
        """As logprobs.logprob_table; equal logits are told in the order of their ids."""
        num_top = min(MAX_TOP_LOGPROBS, self._vocab_size) if has_top else 0
        table: Int32s = np.empty((len(logits), 2 + 2 * num_top), dtype=np.int32)
        values = np.ascontiguousarray(logits.numpy())  # host memory
        chosen = token_ids.numpy()  # host memory
        floats = table.view(np.float32)
        self._run(partial(_tell, self._counters(), values, chosen, table, floats), len(table))
        return torch.from_numpy(table)

    def _counters(self) -> Ints:
        return new_counters(1, self._team.num_threads)

    def _run(self, function: Callable[[int], None], num_rows: int) -> None:
        if num_rows <= _FEW:
            function(0)
        else:
            self._team.run(function)


class _Fixed(NamedTuple):
    """What of the rows' wishes is the same as long as they are: steps after each other mostly are
    of the same samples."""

    params: list[SamplingParams]
    are_greedy: bool
    numbers: npt.NDArray[np.float64]  # see Wishes.params
    penalties: Floats  # see Changes

    @classmethod
    def of(cls, params: list[SamplingParams]) -> "_Fixed":
        numbers = [(p.temperature, p.top_k, p.top_p, _log(p.min_p)) for p in params]
        penalties = [
            (p.repetition_penalty, p.frequency_penalty, p.presence_penalty) for p in params
        ]
        return cls(
            params,
            not any(p.temperature for p in params),
            np.array(numbers, dtype=np.float64).reshape(-1, 4),
            np.array(penalties, dtype=np.float32).reshape(-1, 3),
        )


def changes_of(wanted: Asked, penalties: Floats, vocab_size: int) -> Changes:
    """What `logit_processors.asked` says, as plain arrays; `penalties` [L, 3] of all rows."""
    num_rows = len(penalties)
    mask_of, masks = _no_changes(num_rows)[:2]
    if wanted.masked:
        mask_of, masks = mask_of.copy(), np.stack([words for _, words in wanted.masked])
        mask_of[[row for row, _ in wanted.masked]] = range(len(masks))
    cells: list[Cells | _Cells] = [*map(_banned, wanted.bans), *wanted.biases]
    cells.sort(key=lambda part: part[0])  # bans before biases, as they came
    seen: list[Cells | _Cells] = [
        (row, rules.seen_token_ids, (rules.output_counts,)) for row, rules in wanted.penalties
    ]
    added, counted = (_flat(part, num_rows, vocab_size) for part in (cells, seen))
    return Changes(mask_of, masks, *added, *counted, penalties)


@cache
def _no_changes(num_rows: int) -> Changes:
    """Read only."""
    ends = np.zeros(num_rows + 1, dtype=np.int64)
    return Changes(
        np.full(num_rows, -1, dtype=np.int64),
        np.empty((0, 0), dtype=np.int32),
        *(ends, _NO_IDS, _NO_FLOATS),
        *(ends, _NO_IDS, _NO_FLOATS),
        np.zeros((num_rows, 3), dtype=np.float32),
    )


def _banned(cells: Cells) -> Cells:
    return cells._replace(columns=(np.full(len(cells.token_ids), -np.inf, dtype=np.float32),))


def _flat(
    cells: Sequence[Cells | _Cells], num_rows: int, vocab_size: int
) -> tuple[Ints, Ints, Floats]:
    """Where each row ends, token ids, first columns; `cells` in the order of rows."""
    if not cells:
        return _no_changes(num_rows)[2:5]
    counts = [0] * num_rows
    for row, ids, _ in cells:
        counts[row] += len(ids)
    ends = np.array([0, *accumulate(counts)], dtype=np.int64)
    ids = np.concatenate([ids for _, ids, _ in cells])
    # The kernels look at no bounds. What is negative is large, without its sign.
    assert not len(ids) or ids.view(np.uint64).max() < vocab_size, ids
    return ends, ids, np.concatenate([columns[0] for _, _, columns in cells])


_NO_IDS: Ints = np.empty(0, dtype=np.int64)
_NO_FLOATS: Floats = np.empty(0, dtype=np.float32)


def _log(min_p: float) -> float:
    return math.log(min_p) if min_p > 0.0 else -math.inf


def _choose(
    counters: Ints,
    logits: Floats,
    wishes: Wishes,
    changes: Changes,
    floats: Floats,
    ids: Int32s,
    out: Ints,
    thread: int,
) -> None:
    choose(counters, thread, logits, wishes, changes, floats, ids, out)


def _tell(
    counters: Ints, logits: Floats, chosen: Ints, table: Int32s, floats: Floats, thread: int
) -> None:
    tell(counters, thread, logits, chosen, table, floats)
