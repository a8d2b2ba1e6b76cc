"""The largest of values plus counter-based Gumbel noise, in kernels: see engine/sampler.py.

A token of weight w beats the best score so far, b, only if its uniform number is below w * exp(-b):
the hash is compared with that, and for the dozen that pass the score is computed, in float64.
"""

import math
from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from engine.cpu.adjust import Int32s
from engine.cpu.compare import where_at_least
from engine.cpu.jit import kernel
from engine.cpu.layout import Floats
from engine.cpu.simd import (
    I32,
    LANES,
    V_F32,
    V_I32,
    any_above,
    broadcast,
    constant,
    exp,
    load,
    mul,
    splat,
    store,
    vector,
)

STRETCH = 256
"""Elements of a row that are summed up in float32, at once."""

_MOST = 1e20  # what a weight is multiplied with, at most: enough for any token that can win
_SLACK = 1.001  # for the rounding of the bound
_HASHES = 2.0**31


@kernel
def largest(
    values: Floats,
    weights: Floats,
    ids: Int32s,
    num: int,
    low: np.uint32,
    high: np.uint32,
) -> int:
    """The listed token of the largest score."""
    token_id, best, factor = 0, -np.inf, _factor(-np.inf)
    for i in range(num):
        hashed = _hash(np.uint32(ids[i]), low, high)
        if np.float32(hashed) < weights[i] * factor:
            score = values[i] + _noise(hashed)
            if score > best:
                token_id, best, factor = ids[i], score, _factor(score)
    return token_id


@kernel
def largest_of_all(scaled: Floats, low: np.uint32, high: np.uint32, lanes: Floats) -> int:
    """The token of the largest score. `lanes`: room for a vector."""
    token_id, best, factor = 0, -np.inf, _factor(-np.inf)
    for i in range(0, len(scaled) - LANES, LANES):
        bounds = mul(exp(load(scaled, i)), splat(factor))
        if any_above(bounds, hashes(i, low, high)):
            store(lanes, 0, bounds)
            token_id, best = _best_of(i, lanes, scaled, low, high, token_id, best)
            factor = _factor(best)
    return token_id


@kernel
def largest_from(
    scaled: Floats,
    weights: Floats,
    least: np.float32,
    low: np.uint32,
    high: np.uint32,
    lanes: Floats,
) -> int:
    """The token of the largest score among those at or above `least`. `lanes`: as above."""
    token_id, best, factor = 0, -np.inf, _factor(-np.inf)
    for i in range(0, len(scaled) - LANES, LANES):
        kept = where_at_least(load(scaled, i), splat(least), load(weights, i))
        bounds = mul(kept, splat(factor))
        if any_above(bounds, hashes(i, low, high)):
            store(lanes, 0, bounds)
            token_id, best = _best_of(i, lanes, scaled, low, high, token_id, best)
            factor = _factor(best)
    return token_id


@kernel
def _best_of(
    start: int,
    bounds: Floats,
    scaled: Floats,
    low: np.uint32,
    high: np.uint32,
    token_id: int,
    best: float,
) -> tuple[int, float]:
    """The best so far, or of sixteen tokens from `start` one with a larger score."""
    for j in range(LANES):
        hashed = _hash(np.uint32(start + j), low, high)
        if np.float32(hashed) < bounds[j]:
            score = scaled[start + j] + _noise(hashed)
            if score > best:
                token_id, best = start + j, score
    return token_id, best


@kernel
def _factor(score: float) -> np.float32:
    """Only a token whose hash is below its weight times this can have a larger score."""
    return np.float32(min(math.exp(-score), _MOST) * (_SLACK * _HASHES))


@kernel
def _noise(hashed: np.uint32) -> float:
    """As host_sampler.gumbel_noise."""
    return -math.log(-math.log1p(-(hashed + 0.5) * (1.0 / _HASHES)))


@kernel
def _hash(token_id: np.uint32, low: np.uint32, high: np.uint32) -> np.uint32:
    """31 bits, as sampler.gumbel_noise has them."""
    mixed = _mix32(np.uint32(_mix32(np.uint32(token_id ^ low)) ^ high))
    return np.uint32(mixed & np.uint32(0x7FFFFFFF))


@intrinsic  # type: ignore[untyped-decorator]
def hashes(typing: Any, index: Any, low: Any, high: Any) -> Any:
    """`_hash` of sixteen token ids from `index` on, as float32."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        first = broadcast(builder, builder.trunc(args[0], I32), V_I32)
        x = builder.add(first, ir.Constant(V_I32, [*range(LANES)]))
        for key in args[1:]:
            x = _emit_mix32(builder, builder.xor(x, broadcast(builder, key, V_I32)))
        return builder.sitofp(builder.and_(x, constant(V_I32, 0x7FFFFFFF)), V_F32)

    return vector(types.intp, types.uint32, types.uint32), emit


def _emit_mix32(builder: Any, x: Any) -> Any:
    """As `_mix32`."""
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B), (16, None)):
        x = builder.xor(x, builder.lshr(x, constant(V_I32, shift)))
        x = builder.mul(x, constant(V_I32, factor)) if factor is not None else x
    return x


@kernel
def _mix32(x: np.uint32) -> np.uint32:
    """Wellons' low-bias 32-bit finalizer."""
    x = np.uint32(x ^ (x >> np.uint32(16)))
    x = np.uint32(x * np.uint32(0x7FEB352D))
    x = np.uint32(x ^ (x >> np.uint32(15)))
    x = np.uint32(x * np.uint32(0x846CA68B))
    return np.uint32(x ^ (x >> np.uint32(16)))


@kernel
def noise_key(counters: npt.NDArray[np.uint64]) -> np.uint64:
    """As sampler.noise_keys, of one row."""
    state = np.uint64(0)
    for counter in counters:
        state = _mix64(np.uint64((state ^ counter) + np.uint64(0x9E3779B97F4A7C15)))
    return state


@kernel
def _mix64(x: np.uint64) -> np.uint64:
    """The finalizer of splitmix64."""
    x = np.uint64((x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9))
    x = np.uint64((x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB))
    return np.uint64(x ^ (x >> np.uint64(31)))
