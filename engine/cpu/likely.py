"""Which tokens min-p, top-k and top-p leave of a row, in kernels.

Few tokens lie near the likeliest, and mostly they decide: those are listed. If they do not,

* for top-p, the least value kept is bracketed: first by a part of the row, then by passes over the
  whole of it that weigh what is below four levels at once. Only what is in the bracket is listed,
  and nobody lists what is kept;
* for top-k, a level is sought in the same way above which there are as many as are to be kept and
  few more; what is above it is listed.

The last value kept is found by halving such a list (Hoare's selection, by count for top-k, by
weight for top-p): nobody needs it in order.
"""

import numpy as np

from engine.cpu.adjust import Int32s
from engine.cpu.compare import any_within, count_above, where_above
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
    zeros,
)

_NEAR = -5.0  # where filters look first: of the mass, most is above it
_FEW = 1024  # tokens that are listed without a search for a better level
_LEAST = -32.0  # where that search begins: hardly any mass is below it
_SPLITS = 3  # passes, each for a fifth of what was left, as the next
_LOWEST = -3.0e38  # above -inf only
_PART = 8  # a vector in so many is looked at before all are
_SPLITS_OF_PART = 4
_NARROW = 0.3  # a bracket that holds few tokens
_PASSES = 8  # over the whole row, at most; one or two are usual

ALL, FROM_LEAST = -1, -2  # what `keep_likely` may say instead of a number
WEIGHTS = 5  # row of `own` with the weights of all tokens, where it says FROM_LEAST


@kernel
def keep_likely(
    scaled: Floats, top_k: int, top_p: float, log_min_p: float, own: Floats, ids: Int32s
) -> int:
    """How many tokens are kept: values in own[1], weights in own[2], ids ascending. ALL: none was
    listed. FROM_LEAST: none was listed, and those at or above own[1, 0] are kept."""
    if top_k == 0 and top_p >= 1.0 and log_min_p == -np.inf:
        return ALL
    if log_min_p > -np.inf:
        num = _list(scaled, np.float32(log_min_p), len(scaled), own[1], ids)
        return _keep(num, top_k, top_p, -1.0, True, own, ids)
    total = -1.0 if top_k > 0 else _mass(scaled, own[WEIGHTS])
    num = _list(scaled, np.float32(_NEAR), _FEW, own[1], ids)
    if num <= _FEW:
        num = _keep(num, top_k, top_p, total, False, own, ids)
        if num >= 0:
            return num
    if top_k > 0:
        level = _level(scaled, top_k)
        num = _list(scaled, level, len(scaled), own[1], ids)
        return _keep(num, top_k, top_p, total, True, own, ids)
    own[1, 0] = _least_kept(scaled, own[WEIGHTS], total * (1.0 - top_p), own[3], own[4])
    return FROM_LEAST


@kernel
def _mass(scaled: Floats, weights: Floats) -> float:
    """The weight of all tokens; each one's goes into `weights`."""
    total = 0.0
    for start in range(0, len(scaled) - LANES, STRETCH):
        lanes = zeros()
        for i in range(start, start + STRETCH, LANES):
            weight = exp(load(scaled, i))
            store(weights, i, weight)
            lanes = add(lanes, weight)
        total += sum_lanes(lanes)
    return total


@kernel
def _least_kept(
    scaled: Floats, weights: Floats, droppable: float, values: Floats, listed: Floats
) -> np.float32:
    """The least value that must stay: all below it weigh no more than `droppable`. The last two
    arrays are room."""
    low, high, below = np.float32(_LOWEST), np.float32(1.0), 0.0  # low <= it < high
    a, d = _guess(scaled, weights, droppable)
    for _ in range(_PASSES):
        b, c = np.float32(a + (d - a) / 3), np.float32(d - (d - a) / 3)
        below_a, below_b, below_c, below_d = _below(scaled, weights, a, b, c, d, 1)
        for level, weight in ((a, below_a), (b, below_b), (c, below_c), (d, below_d)):
            if weight <= droppable:
                low, below = max(low, level), max(below, weight)
            else:
                high = min(high, level)
        if high - max(low, np.float32(_LEAST)) <= _NARROW:
            break
        first = max(low, np.float32(_LEAST))
        a, d = np.float32(first + (high - first) / 5), np.float32(high - (high - first) / 5)
    num = 0
    for i in range(0, len(scaled), LANES):
        if any_within(load(scaled, i), splat(low), splat(high)):
            for j in range(i, i + LANES):
                values[num], listed[num] = scaled[j], weights[j]
                num += low <= scaled[j] < high
    return _border(values, listed, num, droppable - below) if num > 0 else low


@kernel
def _guess(scaled: Floats, weights: Floats, below: float) -> tuple[np.float32, np.float32]:
    """Two levels, so that there is probably one between them below which there is that weight: by
    a part of the row. Much of the whole weight is in few tokens, what is to be dropped is not."""
    low, width = np.float32(_LEAST), np.float32(-_LEAST / 5)
    for _ in range(_SPLITS_OF_PART):
        a, b = np.float32(low + width), np.float32(low + 2 * width)
        c, d = np.float32(low + 3 * width), np.float32(low + 4 * width)
        below_a, below_b, below_c, below_d = _below(scaled, weights, a, b, c, d, _PART)
        for level, weight in ((a, below_a), (b, below_b), (c, below_c), (d, below_d)):
            if weight * _PART <= below:
                low = level
        width /= np.float32(5.0)
    return np.float32(low - 5 * width), np.float32(low + 10 * width)


@kernel
def _below(
    scaled: Floats,
    weights: Floats,
    a: np.float32,
    b: np.float32,
    c: np.float32,
    d: np.float32,
    step: int,
) -> tuple[float, float, float, float]:
    """The weight of what is less than each of four levels; of one vector in `step`."""
    levels, end = (splat(a), splat(b), splat(c), splat(d)), len(scaled) - LANES
    sum_a = sum_b = sum_c = sum_d = 0.0
    for start in range(0, end, STRETCH * step):
        in_a, in_b, in_c, in_d = zeros(), zeros(), zeros(), zeros()
        for i in range(start, min(start + STRETCH * step, end), LANES * step):
            lanes, weight = load(scaled, i), load(weights, i)
            in_a = add(in_a, where_above(levels[0], lanes, weight))
            in_b = add(in_b, where_above(levels[1], lanes, weight))
            in_c = add(in_c, where_above(levels[2], lanes, weight))
            in_d = add(in_d, where_above(levels[3], lanes, weight))
        sum_a += sum_lanes(in_a)
        sum_b += sum_lanes(in_b)
        sum_c += sum_lanes(in_c)
        sum_d += sum_lanes(in_d)
    return sum_a, sum_b, sum_c, sum_d


@kernel
def _level(scaled: Floats, wanted: int) -> np.float32:
    """Above it there are as many tokens as `wanted`, and few more."""
    low, width = np.float32(_LEAST), np.float32(-_LEAST / 5)
    for _ in range(_SPLITS):
        a, b = np.float32(low + width), np.float32(low + 2 * width)
        c, d = np.float32(low + 3 * width), np.float32(low + 4 * width)
        levels = splat(a), splat(b), splat(c), splat(d)
        above_a = above_b = above_c = above_d = 0
        for i in range(0, len(scaled) - LANES, LANES):
            lanes = load(scaled, i)
            above_a += count_above(lanes, levels[0])
            above_b += count_above(lanes, levels[1])
            above_c += count_above(lanes, levels[2])
            above_d += count_above(lanes, levels[3])
        for level, above in ((a, above_a), (b, above_b), (c, above_c), (d, above_d)):
            if above >= wanted:
                low = level
        width /= np.float32(5.0)
    return low if low > _LEAST else np.float32(_LOWEST)


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
