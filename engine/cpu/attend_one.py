"""Attention of sequences with one new token, straight over the blocks of their table.

Nothing is gathered: each key and value is read once, where it lies, for all query heads that share
it. Scores are taken 64 keys at a time, with an online softmax (Milakov and Gimelshein, 2018).
"""

import math

import numpy as np

from engine.cpu.gather import add_rows, dot_rows
from engine.cpu.jit import kernel
from engine.cpu.layout import KEYS, Cache, Floats, Ints, Scratch, Shape, Step
from engine.cpu.simd import (
    LANES,
    add,
    exp,
    load,
    max_lanes,
    maximum,
    mul,
    prefetch,
    splat,
    store,
    store_columns,
    sub,
    sum_lanes,
    zeros,
)
from engine.cpu.tile import TILE, height_of

_LINE_BYTES = 64


@kernel
def attend_one(
    shape: Shape,
    step: Step,
    cache: Cache,
    scratch: Scratch,
    thread: int,
    layer: int,
    window: int,
    sequence: int,
    following: int,
    first_head: int,
    end_head: int,
) -> None:
    """What KV heads [first_head, end_head) have to say, for a sequence with one new token: for
    `write_one` to write out. `following` is the sequence that is likely to come next, or -1."""
    dim, per_kv, num_heads = shape.head_dim, shape.heads // shape.kv_heads, shape.heads
    row, seq_len = step.first_rows[sequence], step.seq_lens[sequence]
    floats = scratch.floats[thread]
    sums, scores = floats[: num_heads * dim], floats[num_heads * dim :]  # [heads, dim or KEYS]
    peaks = scores[num_heads * KEYS :]  # [heads], and [heads] of the weights' sums behind them
    _begin(num_heads, sums, peaks)
    scale, plane, table = splat(shape.scale), 2 * layer * cache.plane, step.block_tables[sequence]
    first = _first_key(seq_len, window)
    here, ahead = scratch.offsets[thread, 0], scratch.offsets[thread, 1]
    columns = first_head * dim, end_head * dim
    turns = (end_head - first_head) * (KEYS // LANES)
    left = min(KEYS, seq_len - first)
    _find_keys(shape, cache, table, first, left, plane, here)
    _ask_for(cache, here, 0, left, columns)
    while first < seq_len:
        count, turn = left, 0
        left = min(KEYS, seq_len - first - count)
        num_ahead = left
        if left > 0:
            _find_keys(shape, cache, table, first + count, left, plane, ahead)
        elif following >= 0:
            num_ahead = _find_first(shape, cache, step, following, window, plane, ahead)
        for kv_head in range(first_head, end_head):
            for key in range(0, KEYS, LANES):
                for head in range(kv_head * per_kv, (kv_head + 1) * per_kv if key < count else 0):
                    q_at = (row * num_heads + head) * dim
                    dots = dot_rows(scratch.q, q_at, cache.elements, kv_head * dim, here, key, dim)
                    store(scores, head * KEYS + key, mul(dots, scale))
                # Bit by bit what comes next is on its way while this is computed.
                first_asked, turn = num_ahead * turn // turns, turn + 1
                _ask_for(cache, ahead, first_asked, num_ahead * turn // turns, columns)
            for head in range(kv_head * per_kv, (kv_head + 1) * per_kv):
                scores[head * KEYS + count : (head + 1) * KEYS] = -np.inf
                _weigh(scores, head * KEYS, peaks, head, num_heads, sums, dim)
        for kv_head in range(first_head, end_head):
            head, rows_at = kv_head * per_kv, cache.plane + kv_head * dim
            weights, into = scores[head * KEYS :], sums[head * dim :]
            add_rows(per_kv, weights, KEYS, cache.elements, rows_at, here, count, into, dim)
        first, here, ahead = first + count, ahead, here


@kernel
def ask_for_first(
    shape: Shape,
    step: Step,
    cache: Cache,
    scratch: Scratch,
    thread: int,
    layer: int,
    window: int,
    sequence: int,
    first_head: int,
    end_head: int,
) -> None:
    """What `attend_one` will read first is to come nearer."""
    offsets, plane = scratch.offsets[thread, 0], 2 * layer * cache.plane
    count = _find_first(shape, cache, step, sequence, window, plane, offsets)
    columns = first_head * shape.head_dim, end_head * shape.head_dim
    _ask_for(cache, offsets, 0, count, columns)


@kernel
def write_one(
    shape: Shape,
    step: Step,
    scratch: Scratch,
    thread: int,
    sequence: int,
    first_head: int,
    end_head: int,
) -> None:
    """scratch.attended of what the thread made in `attend_one`."""
    dim, per_kv, num_heads = shape.head_dim, shape.heads // shape.kv_heads, shape.heads
    row, sums = step.first_rows[sequence], scratch.floats[thread]
    totals = sums[num_heads * (dim + KEYS + 1) :]
    tile = row // TILE * TILE
    height = height_of(min(TILE, len(step.slots) - tile))
    for head in range(first_head * per_kv, end_head * per_kv):
        share = splat(1.0 / totals[head])
        for i in range(head * dim, (head + 1) * dim, LANES):
            into_at = tile * num_heads * dim + i * height + (row - tile) * shape.group
            store_columns(scratch.attended, into_at, height, mul(load(sums, i), share))


@kernel
def _begin(num_heads: int, sums: Floats, peaks: Floats) -> None:
    sums[:] = 0.0
    for head in range(num_heads):
        peaks[head], peaks[num_heads + head] = -1e30, 0.0


@kernel
def _first_key(seq_len: int, window: int) -> int:
    return 0 if window == 0 else max(0, seq_len - window)


@kernel
def _find_first(
    shape: Shape, cache: Cache, step: Step, sequence: int, window: int, plane: int, offsets: Ints
) -> int:
    """`_find_keys` of where a sequence begins; how many they are."""
    seq_len = step.seq_lens[sequence]
    first = _first_key(seq_len, window)
    count: int = min(KEYS, seq_len - first)
    _find_keys(shape, cache, step.block_tables[sequence], first, count, plane, offsets)
    return count


@kernel
def _find_keys(
    shape: Shape, cache: Cache, table: Ints, first: int, count: int, plane: int, offsets: Ints
) -> None:
    """Where the keys of positions [first, first + count) begin; the rest, up to KEYS, is the first
    key again: read, and not used."""
    size, stride = cache.block_size, shape.kv_heads * shape.head_dim
    block, slot = first // size, first % size
    at = plane + (table[block] * size + slot) * stride
    offsets[:] = at
    for key in range(count):
        if slot == size:
            block, slot = block + 1, 0
            at = plane + table[block] * size * stride
        offsets[key] = at
        at, slot = at + stride, slot + 1


@kernel
def _ask_for(cache: Cache, offsets: Ints, first: int, end: int, columns: tuple[int, int]) -> None:
    """Keys [first, end) and their values are to come nearer."""
    line = _LINE_BYTES // cache.elements.itemsize
    for key in range(first, end):
        at = offsets[key]
        for i in range(at + columns[0], at + columns[1], line):
            prefetch(cache.elements, i)
            prefetch(cache.elements, i + cache.plane)


@kernel
def _weigh(
    scores: Floats, at: int, peaks: Floats, head: int, num_heads: int, sums: Floats, dim: int
) -> None:
    """Scores [KEYS] become weights; what was summed up under a lower peak is scaled down."""
    highest = load(scores, at)
    for i in range(LANES, KEYS, LANES):
        highest = maximum(highest, load(scores, at + i))
    peak = max(peaks[head], max_lanes(highest))
    shrink = np.float32(1.0)
    if peak != peaks[head]:
        shrink = np.float32(math.exp(peaks[head] - peak))
    peaks[head] = peak
    total, lanes = zeros(), splat(peak)
    for i in range(0, KEYS, LANES):
        weight = exp(sub(load(scores, at + i), lanes))
        total = add(weight, total)
        store(scores, at + i, weight)
    peaks[num_heads + head] = peaks[num_heads + head] * shrink + sum_lanes(total)
    if shrink != 1.0:
        factor = splat(shrink)
        for i in range(head * dim, (head + 1) * dim, LANES):
            store(sums, i, mul(load(sums, i), factor))
