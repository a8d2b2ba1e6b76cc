"""Masks, biases and penalties on one row of logits, in kernels: what engine/logit_processors.py
does to all of them, in the same order and with the same roundings.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from engine.cpu.jit import kernel
from engine.cpu.layout import Floats, Ints

Int32s = npt.NDArray[np.int32]


class Changes(NamedTuple):
    """Of L rows. What concerns row i of `ends` stands in [ends[i], ends[i + 1])."""

    mask_of: Ints  # [L] a row of `masks`; -1: none
    masks: Int32s  # [masks, words] bit i % 32 of word i // 32: token i may come
    added_ends: Ints  # [L + 1]
    added_ids: Ints
    added: Floats  # to the logits of those ids; -inf bans them
    seen_ends: Ints  # [L + 1]
    seen_ids: Ints
    seen_counts: Floats  # among the outputs
    penalties: Floats  # [L, 3]: repetition, frequency, presence


@kernel
def asks(changes: Changes, row: int) -> bool:
    """Whether it has to be changed at all."""
    num_added = changes.added_ends[row + 1] - changes.added_ends[row]
    num_seen = changes.seen_ends[row + 1] - changes.seen_ends[row]
    return bool(changes.mask_of[row] >= 0 or num_added + num_seen > 0)


@kernel
def adjust(changes: Changes, row: int, logits: Floats, adjusted: Floats) -> None:
    """adjusted = logits, as row `row` wants them."""
    size = len(logits)
    for i in range(size):
        adjusted[i] = logits[i]
    if changes.mask_of[row] >= 0:
        _mask(changes.masks[changes.mask_of[row]], adjusted, size)
    for i in range(changes.added_ends[row], changes.added_ends[row + 1]):
        adjusted[changes.added_ids[i]] += changes.added[i]
    repetition = changes.penalties[row, 0]
    frequency, presence = changes.penalties[row, 1], changes.penalties[row, 2]
    for i in range(changes.seen_ends[row], changes.seen_ends[row + 1]):
        token_id, count = changes.seen_ids[i], changes.seen_counts[i]
        value = adjusted[token_id]
        value = value / repetition if value > 0 else value * repetition
        value = np.float32(value - np.float32(frequency * count))
        adjusted[token_id] = value - presence if count > 0 else value


@kernel
def _mask(words: Int32s, adjusted: Floats, size: int) -> None:
    for word in range((size + 31) // 32):
        bits = words[word]
        if bits != -1:  # all of them may come
            for i in range(word * 32, min(word * 32 + 32, size)):
                if not (bits >> (i & 31)) & 1:
                    adjusted[i] = -np.inf
