"""The draw of engine/host_sampler.py as a kernel: the same rules, a row at a time.

A row (50,000 float32) stays in a core's cache. What becomes of it:

1. Logits less the largest, by temperature, in float32 exactly as numpy has them.
2. Filters list what they keep, if there are any (likely.py).
3. The largest score of what is left (gumbel.py).

Whole ties are kept, and of equal scores the lowest id wins: no order of evaluation shows. Weights
are float32 and add up in float64, so top-p keeps what host_sampler keeps but for tokens within 1e-6
of the border, as a share of the mass.
"""

import numpy as np
import numpy.typing as npt

from engine.cpu.gumbel import STRETCH, largest, largest_of_all
from engine.cpu.jit import kernel
from engine.cpu.layout import Floats, Ints
from engine.cpu.likely import Ids, keep_likely
from engine.cpu.simd import LANES, div, load, max_lanes, maximum, splat, store, sub
from engine.cpu.sync import claim, complete, wait

Uint32s = npt.NDArray[np.uint32]
Doubles = npt.NDArray[np.float64]

SCRATCH_ROWS = 5
"""Of `padded` floats each, for each thread."""


def padded(vocab_size: int) -> int:
    """Floats of a row of scratch: whole stretches, and room to write one element too many."""
    return -(-vocab_size // STRETCH) * STRETCH + LANES


@kernel
def draw(
    counters: Ints,
    thread: int,
    logits: Floats,  # [L, vocab]
    rows: Ints,  # [R] which of them to draw for
    temperatures: Floats,  # [R], as all that follow
    top_ks: Ints,
    top_ps: Doubles,
    log_min_ps: Doubles,  # -inf is off
    keys: Uint32s,  # [R, 2]
    floats: Floats,  # [threads, SCRATCH_ROWS, padded]
    ids: Ids,  # [threads, padded]
    out: Ints,  # [L]
) -> None:
    """Every thread takes rows while there are any."""
    item = claim(counters, 0)
    while item < len(rows):
        row = rows[item]
        scaled, own = floats[thread, 0], floats[thread]
        _scale(logits[row], temperatures[item], scaled)
        low, high, vocab = keys[item, 0], keys[item, 1], logits.shape[1]
        top_k = top_ks[item] if top_ks[item] < vocab else 0
        num = keep_likely(scaled, top_k, top_ps[item], log_min_ps[item], own, ids[thread])
        if num < 0:
            out[row] = largest_of_all(scaled, low, high, own[1], own[2])
        else:
            out[row] = largest(own[1], own[2], ids[thread], num, low, high)
        complete(counters, 0)
        item = claim(counters, 0)
    wait(counters, 0, len(rows))


@kernel
def _scale(logits: Floats, temperature: np.float32, scaled: Floats) -> None:
    """(logits - their maximum) / temperature, and -inf behind them."""
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
