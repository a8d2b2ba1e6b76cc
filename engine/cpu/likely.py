"""Which tokens min-p, top-k and top-p leave of a row, in kernels.

Few tokens lie near the likeliest, and mostly they decide: those are listed. Else a level is sought
above which there is what is to be kept and little more, by passes over the whole row that weigh, or
count, what is above four levels at once; then what is above it is listed. The last value kept is
found by halving the list (Hoare's selection, by count for top-k, by weight for top-p): nobody needs
the others in order.
"""

import numpy as np

from engine.cpu.adjust import Int32s
from engine.cpu.gumbel import STRETCH
from engine.cpu.jit import kernel
from engine.cpu.layout import Floats
from engine.cpu.simd import (
    LANES,
    add,
    any_above,
    exp,
    load,
    splat,
    store,
    sum_lanes,
    where_above,
    zeros,
)

_NEAR = -5.0  # where filters look first: of the mass, most is above it
_FEW = 1024  # tokens that are listed without a search for a better level
_LEAST = -32.0  # where that search begins: hardly any mass is below it
_SPLITS = 3  # passes, each for a fifth of what was left
_LOWEST = -3.0e38  # above -inf only


@kernel
def keep_likely(
    scaled: Floats, top_k: int, top_p: float, log_min_p: float, own: Floats, ids: Int32s
) -> int:
    """How many tokens are kept: values in own[1], weights in own[2], ids ascending. -1: all are,
    and none was listed."""
    if top_k == 0 and top_p >= 1.0 and log_min_p == -np.inf:
        return -1
    if log_min_p > -np.inf:
        num = _list(scaled, np.float32(log_min_p), len(scaled), own[1], ids)
        return _keep(num, top_k, top_p, -1.0, True, own, ids)
    total = -1.0 if top_k > 0 else _mass(scaled)
    num = _list(scaled, np.float32(_NEAR), _FEW, own[1], ids)
    if num <= _FEW:
        num = _keep(num, top_k, top_p, total, False, own, ids)
        if num >= 0:
            return num
    wanted = float(top_k) if top_k > 0 else total * top_p
    level = _level(scaled, top_k > 0, wanted, own[2])
    num = _list(scaled, level, len(scaled), own[1], ids)
    return _keep(num, top_k, top_p, total, True, own, ids)


@kernel
def _mass(scaled: Floats) -> float:
    """The weight of all tokens."""
    total = 0.0
    for start in range(0, len(scaled) - LANES, STRETCH):
        lanes = zeros()
        for i in range(start, start + STRETCH, LANES):
            lanes = add(lanes, exp(load(scaled, i)))
        total += sum_lanes(lanes)
    return total


@kernel
def _level(scaled: Floats, counts: bool, wanted: float, weights: Floats) -> np.float32:
    """Above it there is as much weight as `wanted`, or so many tokens, and little more."""
    for i in range(0, len(scaled) - LANES, LANES):
        store(weights, i, splat(np.float32(1.0)) if counts else exp(load(scaled, i)))
    low, width = np.float32(_LEAST), np.float32(-_LEAST / 5)
    for _ in range(_SPLITS):
        a, b = np.float32(low + width), np.float32(low + 2 * width)
        c, d = np.float32(low + 3 * width), np.float32(low + 4 * width)
        above_a, above_b, above_c, above_d = _above(scaled, weights, a, b, c, d)
        if above_d >= wanted:
            low = d
        elif above_c >= wanted:
            low = c
        elif above_b >= wanted:
            low = b
        elif above_a >= wanted:
            low = a
        width /= np.float32(5.0)
    return low if low > _LEAST else np.float32(_LOWEST)


@kernel
def _above(
    scaled: Floats, weights: Floats, a: np.float32, b: np.float32, c: np.float32, d: np.float32
) -> tuple[float, float, float, float]:
    """The weight above each of four levels."""
    levels = splat(a), splat(b), splat(c), splat(d)
    sum_a = sum_b = sum_c = sum_d = 0.0
    for start in range(0, len(scaled) - LANES, STRETCH):
        in_a, in_b, in_c, in_d = zeros(), zeros(), zeros(), zeros()
        for i in range(start, start + STRETCH, LANES):
            lanes, weight = load(scaled, i), load(weights, i)
            in_a = add(in_a, where_above(lanes, levels[0], weight))
            in_b = add(in_b, where_above(lanes, levels[1], weight))
            in_c = add(in_c, where_above(lanes, levels[2], weight))
            in_d = add(in_d, where_above(lanes, levels[3], weight))
        sum_a += sum_lanes(in_a)
        sum_b += sum_lanes(in_b)
        sum_c += sum_lanes(in_c)
        sum_d += sum_lanes(in_d)
    return sum_a, sum_b, sum_c, sum_d


@kernel
def _list(scaled: Floats, least: np.float32, most: int, values: Floats, ids: Int32s) -> int:
    """Tokens at or above `least`, ascending ids; how many, or some number beyond `most`."""
    below = splat(np.float32(least - np.float32(1e-6) - abs(least) * np.float32(1e-6)))
    num = 0
    for i in range(0, len(scaled), LANES):
        if any_above(load(scaled, i), below):
            for j in range(i, i + LANES):
                values[num] = scaled[j]
                ids[num] = j
                num += scaled[j] >= least
            if num > most:
                return num
    return num


@kernel
def _keep(
    num: int, top_k: int, top_p: float, total: float, is_all: bool, own: Floats, ids: Int32s
) -> int:
    """Leaves of the `num` tokens listed what top-k and top-p keep, and weighs it; how many. -1 if
    tokens that are not listed may belong to that. `total`: the weight of all, negative if none but
    the listed matter."""
    values, weights = own[1], own[2]
    if 0 < top_k <= num:
        for i in range(num):
            own[3, i], own[4, i] = values[i], 1.0
        num = _leave(values, ids, num, _border(own[3], own[4], num, float(num - top_k)))
    elif top_k > 0 and not is_all:
        return -1
    _weigh(values, weights, num)
    if top_p >= 1.0:
        return num
    found = 0.0
    for i in range(num):
        found += weights[i]
    below = total - found if total >= 0.0 else 0.0
    droppable = (found + below) * (1.0 - top_p) - below
    if droppable < 0.0 and not is_all:
        return -1
    for i in range(num):
        own[3, i], own[4, i] = values[i], weights[i]
    num = _leave(values, ids, num, _border(own[3], own[4], num, droppable))
    _weigh(values, weights, num)
    return num


@kernel
def _border(values: Floats, weights: Floats, num: int, droppable: float) -> np.float32:
    """The least value that must stay: up to it, ascending, there is more weight than may be
    dropped. Reorders both arrays."""
    first, end, lighter = 0, num, 0.0
    while True:
        pivot = _middle(values[first], values[(first + end) // 2], values[end - 1])
        low, i, high = first, first, end  # [first, low) below it, [low, i) equal, [high, end) above
        below, equal = 0.0, 0.0
        while i < high:
            value, weight = values[i], weights[i]
            if value < pivot:
                values[i], weights[i] = values[low], weights[low]
                values[low], weights[low] = value, weight
                below += weight
                low, i = low + 1, i + 1
            elif value > pivot:
                high -= 1
                values[i], weights[i] = values[high], weights[high]
                values[high], weights[high] = value, weight
            else:
                equal += weight
                i += 1
        if lighter + below > droppable and low > first:
            end = low
        elif lighter + below + equal > droppable or high == end:
            return pivot
        else:
            lighter += below + equal
            first = high


@kernel
def _middle(a: np.float32, b: np.float32, c: np.float32) -> np.float32:
    return max(min(a, b), min(max(a, b), c))


@kernel
def _leave(values: Floats, ids: Int32s, num: int, least: np.float32) -> int:
    """Takes out what is below `least`; how many are left."""
    left = 0
    for i in range(num):
        value, token_id = values[i], ids[i]
        values[left], ids[left] = value, token_id
        left += value >= least
    return left


@kernel
def _weigh(values: Floats, weights: Floats, num: int) -> None:
    for i in range(0, num, LANES):
        store(weights, i, exp(load(values, i)))
