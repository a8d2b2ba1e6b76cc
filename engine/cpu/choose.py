"""Chooses a token for each row of logits, in kernels: what engine/sampler.py says, a row an item.

A row (50,000 float32) stays in a core's cache. What becomes of it:

1. What its sample asks for is applied to a copy, if it asks for anything (adjust.py).
2. Greedy: its largest. Else all less the largest, by temperature, in float32 as numpy has them.
3. Filters, if there are any, list what they keep or find the least of it (likely.py).
4. The largest score of what is left (gumbel.py).

Whole ties are kept, and of equal scores the lowest id wins: no order of evaluation shows. Weights
are float32 and add up in float64, so top-p keeps what host_sampler keeps but for tokens within 1e-6
of the border, as a share of the mass.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from engine.cpu.adjust import Changes, Int32s, adjust, asks
from engine.cpu.gumbel import STRETCH, largest, largest_from, largest_of_all, noise_key
from engine.cpu.jit import kernel
from engine.cpu.layout import Floats, Ints
from engine.cpu.likely import ALL, FROM_LEAST, WEIGHTS, keep_likely
from engine.cpu.simd import LANES, any_above, div, load, max_lanes, maximum, splat, store, sub
from engine.cpu.sync import claim_alone, complete

SCRATCH_ROWS = 6
"""Of `padded` floats each, for each thread."""


class Wishes(NamedTuple):
    """Of L rows."""

    params: npt.NDArray[np.float64]  # [L, 4]: temperature (0: greedy), top_k, top_p, log(min_p)
    counters: npt.NDArray[np.uint64]  # [L, 3] see sampler.noise_counters


def padded(vocab_size: int) -> int:
    """Floats of a row of scratch: whole stretches, and room to write one element too many."""
    return -(-vocab_size // STRETCH) * STRETCH + LANES


@kernel
def choose(
    counters: Ints,
    thread: int,
    logits: Floats,  # [L, vocab]
    wishes: Wishes,
    changes: Changes,
    floats: Floats,  # [threads, SCRATCH_ROWS, padded]
    ids: Int32s,  # [threads, padded]
    out: Ints,  # [L]
) -> None:
    """Every thread takes rows while there are any."""
    row = claim_alone(counters, 0, thread, len(logits))
    while row >= 0:
        own, values = floats[thread], logits[row]
        if asks(changes, row):
            adjust(changes, row, values, own[0])
            values = own[0][: len(values)]
        if wishes.params[row, 0] == 0:
            out[row] = _first_largest(values)
        else:
            out[row] = _draw(row, values, wishes, own, ids[thread])
        complete(counters, 0)
        row = claim_alone(counters, 0, thread, len(logits))


@kernel
def _draw(row: int, values: Floats, wishes: Wishes, own: Floats, ids: Int32s) -> int:
    params, scaled = wishes.params[row], own[0]
    top_k = int(params[1]) if params[1] < len(values) else 0
    key = noise_key(wishes.counters[row])
    low, high = np.uint32(key & np.uint64(0xFFFFFFFF)), np.uint32(key >> np.uint64(32))
    _scale(values, np.float32(params[0]), scaled)
    num = keep_likely(scaled, top_k, params[2], params[3], own, ids)
    if num == ALL:
        return largest_of_all(scaled, low, high, own[1])
    if num == FROM_LEAST:
        return largest_from(scaled, own[WEIGHTS], own[1, 0], low, high, own[2])
    return largest(own[1], own[2], ids, num, low, high)


@kernel
def _first_largest(values: Floats) -> int:
    at, best = 0, values[0]
    whole = len(values) // LANES * LANES
    for i in range(0, whole, LANES):
        if any_above(load(values, i), splat(best)):
            for j in range(i, i + LANES):
                if values[j] > best:
                    at, best = j, values[j]
    for j in range(whole, len(values)):
        if values[j] > best:
            at, best = j, values[j]
    return at


@kernel
def _scale(logits: Floats, temperature: np.float32, scaled: Floats) -> None:
    """(logits - their maximum) / temperature, and -inf behind them; may be the same memory."""
    size = len(logits)
    whole = size // LANES * LANES
    lanes = splat(np.float32(-np.inf))
    for i in range(0, whole, LANES):
        lanes = maximum(lanes, load(logits, i))
    top = max_lanes(lanes)
    for i in range(whole, size):
        top = max(top, logits[i])
    tops, divisors = splat(top), splat(temperature)
    for i in range(0, whole, LANES):
        store(scaled, i, div(sub(load(logits, i), tops), divisors))
    for i in range(whole, size):
        scaled[i] = np.float32(np.float32(logits[i] - top) / temperature)
    scaled[size:] = -np.inf
