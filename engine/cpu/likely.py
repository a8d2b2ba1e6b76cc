"""Which tokens min-p, top-k and top-p leave of a row, in kernels.

Tokens near the likeliest are listed, with their weights. The last value kept is found by halving
the list (Hoare's selection, by count for top-k, by weight for top-p): nobody needs the others in
order. A longer list is made only where the mass of the first is not enough.
"""

import numpy as np

from engine.cpu.adjust import Int32s
from engine.cpu.gumbel import STRETCH
from engine.cpu.jit import kernel
from engine.cpu.layout import Floats
from engine.cpu.simd import LANES, add, any_above, exp, load, splat, store, sum_lanes, zeros

_NEAR, _FAR = -5.0, -10.0  # where filters look first: of the mass, most is above it
_LOWEST = -3.0e38  # above -inf only


@kernel
def keep_likely(
    scaled: Floats, top_k: int, top_p: float, log_min_p: float, own: Floats, ids: Int32s
) -> int:
    """How many tokens are kept: values in own[1], weights in own[2], ids ascending. -1: all are,
    and none was listed."""
    if top_k == 0 and top_p >= 1.0 and log_min_p == -np.inf:
        return -1
    if log_min_p == -np.inf:
        total = -1.0 if top_k > 0 else _mass(scaled)
        near = _NEAR
        while near >= _FAR:
            num = _list(scaled, np.float32(near), own[1], ids)
            num = _keep(num, top_k, top_p, total, False, own, ids)
            if num >= 0:
                return num
            near += _FAR - _NEAR
    num = _list(scaled, np.float32(max(log_min_p, _LOWEST)), own[1], ids)
    return _keep(num, top_k, top_p, -1.0, True, own, ids)


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
def _list(scaled: Floats, least: np.float32, values: Floats, ids: Int32s) -> int:
    """Tokens at or above `least`, ascending ids; how many."""
    below = splat(np.float32(least - np.float32(1e-6) - abs(least) * np.float32(1e-6)))
    num = 0
    for i in range(0, len(scaled), LANES):
        if any_above(load(scaled, i), below):
            for j in range(i, i + LANES):
                values[num] = scaled[j]
                ids[num] = j
                num += scaled[j] >= least
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
