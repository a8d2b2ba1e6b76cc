"""Changes logits as samples ask for, before a token is chosen; many samples at a time.

The order is that of vLLM's sampler, as its documentation states it:

1. masks: a grammar's, `allowed_token_ids`, `bad_words`, `min_tokens`
2. `logit_bias`
3. `repetition_penalty` (prompt and outputs), `frequency_penalty`, `presence_penalty` (outputs)

Temperature, min-p, top-k and top-p come behind (engine/sampler.py). What a mask takes away is
-inf. Of several masks the later ones give way where nothing would be left: a grammar goes before
`allowed_token_ids`, and that before `bad_words` and `min_tokens`.

Only rows that ask for something are touched, and of those only the logits concerned, but for
masked rows. What the host knows goes over by one copy; nothing here waits for the device. No row
depends on another.
"""

from collections.abc import Iterator
from collections.abc import Sequence as Rows
from functools import cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.logit_rules import LogitRules, Words, remove_ids


class RowRules(NamedTuple):
    """What one row of logits asks for."""

    rules: LogitRules | None
    grammar: Words | None
    """A grammar's set of token ids that may come next; see `sampler.SampleRow.grammar`."""


class Cells(NamedTuple):
    """Logits of one row, and numbers for each of them."""

    row: int
    token_ids: npt.NDArray[np.int64]  # [n]
    columns: tuple[npt.NDArray[np.float32], ...] = ()  # [n] each


class Asked(NamedTuple):
    """What all rows of a step ask for, on the host."""

    masked: list[tuple[int, Words]]
    """Row, and what may come next there."""
    bans: list[Cells]
    """Set to -inf; in no row that is masked."""
    biases: list[Cells]
    """Column: what is added."""
    penalties: list[tuple[int, LogitRules]]
    """Row, and who has penalties."""

    def __bool__(self) -> bool:
        return any(self[:])


def asked(rows: Rows[RowRules], vocab_size: int) -> Asked:
    """Each list in the order of rows."""
    all_of_it = Asked([], [], [], [])
    for index, (rules, grammar) in enumerate(rows):
        if rules is None:
            if grammar is not None:
                all_of_it.masked.append((index, grammar))
            continue
        banned = rules.banned_token_ids()
        words = _meet(grammar, rules.allowed_words(vocab_size))
        if words is not None:
            all_of_it.masked.append((index, remove_ids(words, banned)))
        elif 0 < len(banned) < vocab_size:
            all_of_it.bans.append(Cells(index, np.array(banned)))
        if rules.params.logit_bias:
            all_of_it.biases.append(_bias_cells(index, rules))
        if rules.has_penalties:
            all_of_it.penalties.append((index, rules))
    return all_of_it


def process_logits(logits: Tensor, rows: Rows[RowRules]) -> Tensor:
    """[L, vocab] float32; the tensor itself if no row asks for anything, else a changed copy."""
    vocab_size = logits.shape[1]
    wanted = asked(rows, vocab_size)
    if not wanted:
        return logits
    masked = wanted.masked
    penalties = [_penalty_cells(row, rules) for row, rules in wanted.penalties]
    parts = _to_device(
        [
            np.array([index for index, _ in masked], dtype=np.int32),
            np.concatenate([words for _, words in masked]) if masked else _NO_WORDS,
            *_columns(wanted.bans, 0, vocab_size),
            *_columns(wanted.biases, 1, vocab_size),
            *_columns(penalties, 4, vocab_size),
        ],
        logits.device,
    )
    processed = logits.clone()
    _mask(processed, next(parts), next(parts))
    flat = processed.view(-1)
    _ban(flat, next(parts))
    _add_bias(flat, next(parts), next(parts))
    _penalize(flat, *parts)
    return processed


_NO_WORDS: Words = np.empty(0, dtype=np.int32)


def _bias_cells(row: int, rules: LogitRules) -> Cells:
    token_ids, values = zip(*rules.params.logit_bias, strict=True)
    return Cells(row, np.array(token_ids), (np.array(values, dtype=np.float32),))


def _penalty_cells(row: int, rules: LogitRules) -> Cells:
    params, counts = rules.params, rules.output_counts
    fixed = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
    columns = (np.full(len(counts), value, dtype=np.float32) for value in fixed)
    return Cells(row, rules.seen_token_ids, (counts, *columns))


def _columns(
    cells: Rows[Cells], num_columns: int, vocab_size: int
) -> Iterator[npt.NDArray[np.int32]]:
    """Their places in flat logits, then their columns, as int32 words, all rows in one."""
    if not cells:
        yield from [_NO_WORDS] * (1 + num_columns)
        return
    places = [row * vocab_size + token_ids for row, token_ids, _ in cells]
    yield np.concatenate(places).astype(np.int32)
    for index in range(num_columns):
        yield np.concatenate([columns[index] for _, _, columns in cells]).view(np.int32)


def _to_device(arrays: list[npt.NDArray[np.int32]], device: torch.device) -> Iterator[Tensor]:
    """Each of them, [n] int32, by one copy of all."""
    sizes = [len(array) for array in arrays]
    host = torch.empty(sum(sizes), dtype=torch.int32, pin_memory=device.type == "cuda")
    np.concatenate(arrays, out=host.numpy())  # host memory
    return iter(torch.split(host.to(device, non_blocking=True), sizes))


def _meet(grammar: Words | None, allowed: Words | None) -> Words | None:
    if grammar is None or allowed is None:
        return allowed if grammar is None else grammar
    both = grammar & allowed
    return both if both.any() else grammar


def _mask(logits: Tensor, where: Tensor, words: Tensor) -> None:
    """words: [rows * words of a row]. A table turns each byte into what its eight tokens get added:
    5 to 10 times as fast on a CPU as filling by a mask of booleans."""
    if not where.numel():
        return
    summands = _summands(logits.device).index_select(0, words.view(torch.uint8).int())
    summands = summands.view(len(where), -1)[:, : logits.shape[1]]
    if len(where) == len(logits):
        logits += summands
    else:
        logits.index_add_(0, where, summands)


@cache
def _summands(device: torch.device) -> Tensor:
    """[256, 8] float32: 0 for each bit that is set in a byte, -inf for the others."""
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    with np.errstate(divide="ignore"):
        return torch.from_numpy(np.log(bits, dtype=np.float32)).to(device)


def _ban(flat: Tensor, places: Tensor) -> None:
    if places.numel():
        flat.index_fill_(0, places.long(), -torch.inf)


def _add_bias(flat: Tensor, places: Tensor, bias: Tensor) -> None:
    if places.numel():
        flat.index_add_(0, places.long(), bias.view(torch.float32))


def _penalize(
    flat: Tensor,
    places: Tensor,
    counts: Tensor,
    repetition: Tensor,
    frequency: Tensor,
    presence: Tensor,
) -> None:
    if not places.numel():
        return
    where, counts = places.long(), counts.view(torch.float32)
    repetition = repetition.view(torch.float32)
    chosen = flat[where]
    chosen = torch.where(chosen > 0, chosen / repetition, chosen * repetition)
    chosen -= frequency.view(torch.float32) * counts
    chosen -= presence.view(torch.float32) * (counts > 0)
    flat.index_copy_(0, where, chosen)
