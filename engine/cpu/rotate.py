"""Rotary embedding, and the way of new keys and values into their slots: one region."""

import math

from engine.cpu.jit import kernel
from engine.cpu.layout import Cache, Floats, Ints, Scratch, Shape, Step
from engine.cpu.simd import LANES, add, fma, load, mul, splat, store, sub, sum_lanes, zeros
from engine.cpu.sync import claim_alone, complete

_TOKENS = 4
"""Tokens of an item."""


@kernel
def rotate_and_write(
    counters: Ints,
    region: int,
    thread: int,
    shape: Shape,
    step: Step,
    cache: Cache,
    scratch: Scratch,
    layer: int,
    head_norms: Floats,
) -> None:
    """q to scratch.q, k and v to the tokens' slots; head_norms [2, head_dim]."""
    num_tokens, dim, heads, kv_heads = len(step.slots), shape.head_dim, shape.heads, shape.kv_heads
    num_out, qkv = (heads + 2 * kv_heads) * dim, scratch.qkv
    items = (num_tokens + _TOKENS - 1) // _TOKENS
    item = claim_alone(counters, region, thread, items)
    while item >= 0:
        for token in range(item * _TOKENS, min((item + 1) * _TOKENS, num_tokens)):
            at = token * num_out
            k_at = 2 * layer * cache.plane + step.slots[token] * kv_heads * dim
            v_at = k_at + cache.plane
            for head in range(heads + kv_heads):
                first = at + head * dim
                if shape.has_head_norms:
                    _norm_head(qkv, first, dim, head_norms[0 if head < heads else 1], shape.eps)
                if head < heads:
                    into, into_at = scratch.q, (token * heads + head) * dim
                    _rotate(qkv, first, dim, step.cos[token], step.sin[token], into, into_at)
                else:
                    into, into_at = cache.elements, k_at + (head - heads) * dim
                    _rotate(qkv, first, dim, step.cos[token], step.sin[token], into, into_at)
            values = at + (heads + kv_heads) * dim
            for column in range(0, kv_heads * dim, LANES):
                store(cache.elements, v_at + column, load(qkv, values + column))
        complete(counters, region)
        item = claim_alone(counters, region, thread, items)


@kernel
def _norm_head(x: Floats, first: int, dim: int, weight: Floats, eps: float) -> None:
    squares = zeros()
    for i in range(0, dim, LANES):
        lanes = load(x, first + i)
        squares = fma(lanes, lanes, squares)
    scale = splat(1.0 / math.sqrt(sum_lanes(squares) / dim + eps))
    for i in range(0, dim, LANES):
        store(x, first + i, mul(mul(load(x, first + i), scale), load(weight, i)))


@kernel
def _rotate(
    x: Floats, first: int, dim: int, cos: Floats, sin: Floats, into: Floats, into_at: int
) -> None:
    """Pairs (i, i + dim / 2)."""
    half = dim // 2
    for i in range(0, half, LANES):
        c, s = load(cos, i), load(sin, i)
        left, right = load(x, first + i), load(x, first + half + i)
        store(into, into_at + i, sub(mul(left, c), mul(right, s)))
        store(into, into_at + half + i, add(mul(right, c), mul(left, s)))
