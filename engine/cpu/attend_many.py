"""Attention of sequences with several new tokens, by products.

1. `pack`: keys and values of each KV head are laid out as panels (see tile.py), 64 keys at a time:
   for the scores the columns are keys and K is the head's dimension; for the sums the columns are
   the dimension and K is the keys.
2. `attend_tile`: twelve rows, (token, query head) pairs that share a KV head, pass over the
   panels with an online softmax; scores stay in float32 and in the core's cache
   (FlashAttention-2: Dao, 2023). Weights are rounded to the model's dtype for their product.
"""

import math

import numpy as np

from engine.cpu.jit import kernel
from engine.cpu.layout import KEYS, Cache, Elements, Floats, Ints, Scratch, Shape, Step
from engine.cpu.simd import (
    LANES,
    add,
    any_above,
    exp2,
    fma,
    load,
    max_lanes,
    maximum,
    mul,
    splat,
    store,
    store_columns,
    sub,
    sum_lanes,
    zeros,
)
from engine.cpu.sync import claim_alone, complete
from engine.cpu.tile import PANEL, TILE, add_weighted, height_of, multiply

_LOG2_E = math.log2(math.e)


@kernel
def pack(
    counters: Ints,
    region: int,
    thread: int,
    shape: Shape,
    step: Step,
    cache: Cache,
    scratch: Scratch,
    layer: int,
) -> None:
    """scratch.packed_k, packed_v of the sequences in step.packed. An item is 64 keys of a head."""
    items = len(step.pack_items) * shape.kv_heads
    item = claim_alone(counters, region, thread, items)
    while item >= 0:
        index, block = step.pack_items[item // shape.kv_heads]
        kv_head = item % shape.kv_heads
        into = step.packed_at[index] + kv_head * step.packed_stride[index]
        into += block * KEYS * shape.head_dim
        _pack_block(shape, step, cache, scratch, layer, step.packed[index], kv_head, block, into)
        complete(counters, region)
        item = claim_alone(counters, region, thread, items)


@kernel
def _pack_block(
    shape: Shape,
    step: Step,
    cache: Cache,
    scratch: Scratch,
    layer: int,
    sequence: int,
    kv_head: int,
    block: int,
    into: int,
) -> None:
    dim, group = shape.head_dim, shape.group
    num_words, seq_len = dim // group, step.seq_lens[sequence]
    k_words, v_elements = scratch.packed_k_words, scratch.packed_v
    plane = 2 * layer * cache.plane + kv_head * dim
    for key in range(KEYS):
        position = block * KEYS + key
        k_at = into // group + key // PANEL * PANEL * num_words + key % PANEL
        v_at = into + key // group * PANEL * group + key % group
        if position >= seq_len:  # weighed with 0, which does not make up for an infinity
            for word in range(num_words):
                k_words[k_at + word * PANEL] = 0
            for i in range(dim):
                v_elements[v_at + i // PANEL * PANEL * KEYS + i % PANEL * group] = 0
            continue
        slot = step.block_tables[sequence, position // cache.block_size] * cache.block_size
        slot += position % cache.block_size
        at = plane + slot * shape.kv_heads * dim
        for word in range(num_words):
            k_words[k_at + word * PANEL] = cache.words[at // group + word]
        at += cache.plane
        for first in range(0, dim, PANEL):
            for i in range(PANEL):
                v_elements[v_at + first * KEYS + i * group] = cache.elements[at + first + i]


@kernel
def attend_tile(
    shape: Shape,
    step: Step,
    scratch: Scratch,
    thread: int,
    window: int,
    index: int,
    kv_head: int,
    first: int,
) -> None:
    """Up to twelve rows of step.packed[index], from its row `first`; `write_tile` says where to."""
    dim, per_kv, group = shape.head_dim, shape.heads // shape.kv_heads, shape.group
    sequence = step.packed[index]
    first_row, end_row = step.first_rows[sequence], step.first_rows[sequence + 1]
    computed = step.seq_lens[sequence] - (end_row - first_row)
    num_rows = min(TILE, (end_row - first_row) * per_kv - first)
    height = height_of(num_rows)
    floats, elements = scratch.floats[thread], scratch.elements[thread]
    sums, scores = floats[: TILE * dim], floats[TILE * dim :]  # [TILE, dim], [2, TILE, PANEL]
    totals = scores[2 * TILE * PANEL :]  # [TILE, LANES] sums of weights
    peaks = totals[TILE * LANES :]  # [TILE]
    q, weights = elements[: TILE * dim], elements[TILE * dim :]  # a row tile, and [TILE, KEYS]
    sums[:] = 0.0
    totals[:] = 0.0
    elements[:] = 0
    for row in range(num_rows):
        peaks[row] = -1e30
        token, head = first_row + (first + row) // per_kv, (first + row) % per_kv
        at = (token * shape.heads + kv_head * per_kv + head) * dim
        for i in range(0, dim, LANES):
            store_columns(q, i * height + row * group, height, load(scratch.q, at + i))
    lowest = computed + first // per_kv  # position of the first row
    key = 0 if window == 0 else max(0, lowest + 1 - window) // KEYS * KEYS
    highest = computed + (first + num_rows - 1) // per_kv
    while key <= highest:
        at = step.packed_at[index] + kv_head * step.packed_stride[index] + key * dim
        half = TILE * PANEL
        multiply(height, q, 0, scratch.packed_k, at, dim, scores[:half])
        multiply(height, q, 0, scratch.packed_k, at + PANEL * dim, dim, scores[half:])
        needs_mask = key + KEYS > lowest + 1 or (window and key + window <= highest)
        for row in range(num_rows):
            if needs_mask:
                _mask(scores, row, key, computed + (first + row) // per_kv, window)
            _weigh(shape, scores, row, peaks, totals, weights, sums)
        for i in range(0, dim, PANEL):
            add_weighted(height, weights, scratch.packed_v, at + i * KEYS, sums, i, dim)
        key += KEYS


@kernel
def _mask(scores: Floats, row: int, key: int, position: int, window: int) -> None:
    """-inf for keys behind the row's position, or before its window."""
    if position < key + KEYS - 1:
        for i in range(max(0, position + 1 - key), KEYS):
            scores[i // PANEL * TILE * PANEL + row * PANEL + i % PANEL] = -np.inf
    if window and position + 1 - window > key:
        for i in range(min(KEYS, position + 1 - window - key)):
            scores[i // PANEL * TILE * PANEL + row * PANEL + i % PANEL] = -np.inf


@kernel
def _weigh(
    shape: Shape,
    scores: Floats,
    row: int,
    peaks: Floats,
    totals: Floats,
    weights: Elements,
    sums: Floats,
) -> None:
    """Scores of a row become weights; under a new peak, all before them shrinks. Peaks are in
    powers of 2, so that an exponential has one step less."""
    scale, lanes = splat(shape.scale * _LOG2_E), splat(peaks[row])
    at, other = row * PANEL, (TILE + row) * PANEL
    a, b = load(scores, at), load(scores, at + LANES)
    c, d = load(scores, other), load(scores, other + LANES)
    highest = mul(maximum(maximum(a, b), maximum(c, d)), scale)
    if any_above(highest, lanes):
        peak = max_lanes(highest)
        lanes = splat(peak)
        shrink = exp2(sub(splat(peaks[row]), lanes))
        peaks[row] = peak
        store(totals, row * LANES, mul(load(totals, row * LANES), shrink))
        for i in range(row * shape.head_dim, (row + 1) * shape.head_dim, LANES):
            store(sums, i, mul(load(sums, i), shrink))
    below = sub(zeros(), lanes)
    a, b = exp2(fma(a, scale, below)), exp2(fma(b, scale, below))
    c, d = exp2(fma(c, scale, below)), exp2(fma(d, scale, below))
    total = add(add(a, b), add(c, d))
    store(totals, row * LANES, add(load(totals, row * LANES), total))
    store(weights, row * KEYS, a)
    store(weights, row * KEYS + LANES, b)
    store(weights, row * KEYS + 2 * LANES, c)
    store(weights, row * KEYS + 3 * LANES, d)


@kernel
def write_tile(
    shape: Shape, step: Step, scratch: Scratch, thread: int, index: int, kv_head: int, first: int
) -> None:
    """scratch.attended of what the thread made in `attend_tile`."""
    dim, per_kv, width = shape.head_dim, shape.heads // shape.kv_heads, shape.heads * shape.head_dim
    sequence, sums = step.packed[index], scratch.floats[thread]
    totals = sums[TILE * (dim + 2 * PANEL) :]
    first_row, end_row = step.first_rows[sequence], step.first_rows[sequence + 1]
    for row in range(min(TILE, (end_row - first_row) * per_kv - first)):
        token, head = first_row + (first + row) // per_kv, (first + row) % per_kv
        tile = token // TILE * TILE
        height = height_of(min(TILE, len(step.slots) - tile))
        scale = splat(1.0 / sum_lanes(load(totals, row * LANES)))
        for i in range(0, dim, LANES):
            column = (kv_head * per_kv + head) * dim + i
            into = tile * width + column * height + (token - tile) * shape.group
            store_columns(scratch.attended, into, height, mul(load(sums, row * dim + i), scale))
