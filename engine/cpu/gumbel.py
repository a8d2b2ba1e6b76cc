"""The largest of values plus counter-based Gumbel noise, in kernels: see engine/sampler.py.

A token of weight w beats the best score so far, b, only if its uniform number is below w * exp(-b):
the hash is compared with that, and for the dozen that pass the score is computed, in float64.
"""

import math

import numpy as np
import numpy.typing as npt

from engine.cpu.adjust import Int32s
from engine.cpu.jit import kernel
from engine.cpu.layout import Floats
from engine.cpu.simd import LANES, any_above, exp, load, mul, splat, store

STRETCH = 256
"""Elements of a row that are hashed, or summed up in float32, at once."""

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
def largest_of_all(
    scaled: Floats, low: np.uint32, high: np.uint32, hashes: Floats, weights: Floats
) -> int:
    """The token of the largest score."""
    token_id, best, factor = 0, -np.inf, _factor(-np.inf)
    for start in range(0, len(scaled) - LANES, STRETCH):
        for i in range(STRETCH):
            hashes[i] = np.float32(_hash(np.uint32(start + i), low, high))
        for i in range(0, STRETCH, LANES):
            bounds = mul(exp(load(scaled, start + i)), splat(factor))
            if any_above(bounds, load(hashes, i)):
                store(weights, 0, bounds)
                for j in range(LANES):
                    if hashes[i + j] < weights[j]:
                        at = start + i + j
                        score = scaled[at] + _noise(_hash(np.uint32(at), low, high))
                        if score > best:
                            token_id, best, factor = at, score, _factor(score)
    return token_id


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
