"""How likely tokens were, in kernels: what logprobs.logprob_table computes, a row an item.

One pass finds the largest logit, the likeliest tokens and how many are likelier than the one
chosen; a second adds up the exponentials.
"""

import math

import numpy as np

from engine.cpu.adjust import Int32s
from engine.cpu.compare import count_above
from engine.cpu.gumbel import STRETCH
from engine.cpu.jit import kernel
from engine.cpu.layout import Floats, Ints
from engine.cpu.simd import (
    LANES,
    add,
    any_above,
    exp,
    load,
    max_lanes,
    maximum,
    splat,
    sub,
    sum_lanes,
    zeros,
)
from engine.cpu.sync import claim_alone, complete


@kernel
def tell(
    counters: Ints,
    thread: int,
    logits: Floats,  # [R, vocab]
    chosen: Ints,  # [R]
    table: Int32s,  # [R, 2 + 2k], see logprobs.logprob_table
    floats: Floats,  # the same memory
) -> None:
    """Every thread takes rows while there are any."""
    row = claim_alone(counters, 0, thread, len(logits))
    while row >= 0:
        _tell_one(logits[row], logits[row, chosen[row]], table[row], floats[row])
        complete(counters, 0)
        row = claim_alone(counters, 0, thread, len(logits))


@kernel
def _tell_one(logits: Floats, chosen: np.float32, table: Int32s, floats: Floats) -> None:
    k = (len(table) - 2) // 2
    ids, tops = table[2 : 2 + k], floats[2 + k :]
    size, whole = len(logits), len(logits) // LANES * LANES
    for j in range(k):
        _insert(logits[j], j, j, ids, tops)
    num_larger = 0
    peaks, level = splat(np.float32(-np.inf)), splat(chosen)
    for i in range(0, whole, LANES):
        lanes = load(logits, i)
        peaks = maximum(peaks, lanes)
        num_larger += count_above(lanes, level)
        if k > 0 and any_above(lanes, splat(tops[k - 1])):
            for j in range(max(i, k), i + LANES):
                if logits[j] > tops[k - 1]:
                    _insert(logits[j], j, k - 1, ids, tops)
    peak = max_lanes(peaks)
    for j in range(whole, size):
        peak = max(peak, logits[j])
        num_larger += logits[j] > chosen
        if k > 0 and j >= k and logits[j] > tops[k - 1]:
            _insert(logits[j], j, k - 1, ids, tops)
    total = np.float32(peak + math.log(_mass(logits, peak)))
    floats[0] = chosen - total
    table[1] = 1 + num_larger
    for j in range(k):
        tops[j] -= total


@kernel
def _insert(value: np.float32, token_id: int, last: int, ids: Int32s, tops: Floats) -> None:
    """Into a list sorted downwards that ends with `last`, whose place is free; behind its equals,
    so that the lower id comes first."""
    at = last
    while at > 0 and tops[at - 1] < value:
        ids[at], tops[at] = ids[at - 1], tops[at - 1]
        at -= 1
    ids[at], tops[at] = token_id, value


@kernel
def _mass(logits: Floats, peak: np.float32) -> float:
    """The sum of exp(logit - peak)."""
    total, lanes = 0.0, splat(peak)
    whole = len(logits) // LANES * LANES
    for start in range(0, whole, STRETCH):
        part = zeros()
        for i in range(start, min(start + STRETCH, whole), LANES):
            part = add(part, exp(sub(load(logits, i), lanes)))
        total += sum_lanes(part)
    for i in range(whole, len(logits)):
        total += math.exp(logits[i] - peak)
    return total
