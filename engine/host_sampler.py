"""The draw of engine/sampler.py on the CPU: the same rules, row by row, in numpy.

A row of 50,000 float32 lies in a core's cache, and numpy's passes over it cost microseconds, where
the same as batched tensors costs several times that. Two things spare most of the work, and change
no token:

* Filters look only at tokens near the likeliest; the whole row is sorted only where their mass is
  not enough to decide.
* Noise is computed only for tokens that could win. The score s + g of a token exceeds one already
  found, b, only if its uniform number u is below 1 - exp(-exp(s - b)), hence below exp(s - b). All
  u are compared with that; about one token in the row passes. (Lazy evaluation of the Gumbel-max
  trick, as in Maddison, Tarlow and Minka, 2014.)

Scores are added up in float64, so that what is chosen does not depend on a library's logarithm.
"""

import math
import threading
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from engine.request import SamplingParams

Row = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]
Uint32s = npt.NDArray[np.uint32]

_NEAR = (-5.0, -10.0)  # where filters look first: of the mass, most is above it
_LOWEST = np.finfo(np.float32).min
_MANY = 4096  # kept tokens, from which on not all noise is computed
_FIRST = 64  # tokens whose noise gives a first score to beat
_SLACK = np.float32(1.001)  # for the rounding of the bound
_15, _16 = np.uint32(15), np.uint32(16)
_FACTORS = np.uint32(0x7FEB352D), np.uint32(0x846CA68B)


def draw_tokens(
    logits: npt.NDArray[np.float32],
    rows: Sequence[int],
    params: Sequence[SamplingParams],
    keys: npt.NDArray[np.uint64],
    out: npt.NDArray[np.int64],
) -> None:
    """logits: [L, vocab]; draws for `rows`, each with its own params and key, into `out` [L]."""
    for row, row_params, key in zip(rows, params, keys.tolist(), strict=True):  # host memory
        out[row] = _draw(logits[row], row_params, key)


def _draw(logits: Row, params: SamplingParams, key: int) -> int:
    # The maximum goes first: a tiny temperature must not overflow the others.
    scaled = logits - logits.max()
    if params.temperature != 1.0:
        scaled /= np.float32(params.temperature)
    kept = keep(scaled, params)
    if kept is None:
        return _largest_of_all(scaled, key)
    if len(kept) < _MANY:
        return int(kept[_scores(scaled, kept, key).argmax()])
    rest = np.full_like(scaled, -np.inf)
    rest[kept] = scaled[kept]
    return _largest_of_all(rest, key)


def keep(scaled: Row, params: SamplingParams) -> Ids | None:
    """scaled: [vocab], its largest 0 → the ids that min-p, top-k and top-p leave; None: all."""
    has_top_k = 0 < params.top_k < len(scaled)
    if not (has_top_k or params.top_p < 1.0 or params.min_p > 0.0):
        return None
    least = math.log(params.min_p) if params.min_p > 0.0 else -math.inf
    if not has_top_k and params.top_p == 1.0:
        return np.flatnonzero(scaled >= np.float32(least))
    total = None if has_top_k else _mass(scaled, least)
    for near in _NEAR:
        if near > least and (kept := _keep_near(scaled, near, params, total)) is not None:
            return kept
    kept = _keep_near(scaled, least, params, None, is_all=True)
    assert kept is not None, "all that min-p left is there"
    return kept


def _mass(scaled: Row, least: float) -> float:
    """Of all tokens at or above `least`."""
    weights = np.exp(scaled, out=_scratch(len(scaled)).floats)
    if least > -math.inf:
        weights[scaled < np.float32(least)] = 0.0
    return float(weights.sum(dtype=np.float64))


def _keep_near(
    scaled: Row, near: float, params: SamplingParams, total: float | None, *, is_all: bool = False
) -> Ids | None:
    """What top-k and top-p keep of the tokens at or above `near`; None if tokens below it may
    belong to that. `total`: the mass with those below it, None if top-k is on. `is_all`: they are
    out anyway."""
    least = np.float32(near) if near > -math.inf else _LOWEST
    ids = np.flatnonzero(scaled >= least)
    values = scaled[ids]
    has_top_k = 0 < params.top_k < len(scaled)
    if has_top_k and params.top_k <= len(ids):
        kth = np.partition(values, -params.top_k)[-params.top_k]
        ids, values = ids[values >= kth], values[values >= kth]
    elif has_top_k and not is_all:
        return None
    if params.top_p == 1.0:
        return ids
    found = float(np.exp(values, dtype=np.float64).sum())
    below = 0.0 if total is None else total - found
    droppable = (found + below) * (1.0 - params.top_p) - below
    if droppable < 0.0:
        return None
    # The least likely token kept: up to it, ascending, there is more mass than may be dropped.
    ascending = np.sort(values)
    mass = np.exp(ascending, dtype=np.float64).cumsum()
    index = min(int(np.searchsorted(mass, droppable, side="right")), len(mass) - 1)
    kept: Ids = ids[values >= ascending[index]]
    return kept


def _largest_of_all(scaled: Row, key: int) -> int:
    """The token of the largest score."""
    first = np.flatnonzero(scaled > -2.0)[:_FIRST]
    scores = _scores(scaled, first, key)
    best = int(scores.argmax())
    scratch = _scratch(len(scaled))
    bound = np.exp(scaled, out=scratch.floats)
    bound *= np.float32(min(math.exp(-scores[best]), 1e30)) * _SLACK * np.float32(2.0**31)
    np.copyto(scratch.hashed, scratch.ids)
    _bits(scratch.hashed, key, scratch.shifted)
    # As float32: numpy would compare integers with floats in float64.
    np.copyto(scratch.uniform, scratch.hashed, casting="unsafe")
    rivals = np.flatnonzero(scratch.uniform < bound)
    if not len(rivals):
        return int(first[best])
    rival_scores = _scores(scaled, rivals, key)
    rival = int(rival_scores.argmax())
    return int(rivals[rival]) if rival_scores[rival] > scores[best] else int(first[best])


def _scores(scaled: Row, ids: Ids, key: int) -> npt.NDArray[np.float64]:
    return scaled[ids] + gumbel_noise(ids, key)


def gumbel_noise(ids: Ids, key: int) -> npt.NDArray[np.float64]:
    """As sampler.gumbel_noise, of a few token ids."""
    hashed = ids.astype(np.uint32)
    uniform = (_bits(hashed, key, np.empty_like(hashed)) + 0.5) * 2.0**-31
    noise: npt.NDArray[np.float64] = -np.log(-np.log1p(-uniform))
    return noise


def _bits(x: Uint32s, key: int, shifted: Uint32s) -> Uint32s:
    """31 bits for each token id in `x`, in its place; `shifted` is room for as many."""
    x ^= np.uint32(key & 0xFFFFFFFF)
    _mix32(x, shifted)
    x ^= np.uint32(key >> 32)
    _mix32(x, shifted)
    x &= np.uint32(0x7FFFFFFF)
    return x


def _mix32(x: Uint32s, shifted: Uint32s) -> None:
    """As sampler._mix32: Wellons' low-bias finalizer."""
    x ^= np.right_shift(x, _16, out=shifted)
    x *= _FACTORS[0]
    x ^= np.right_shift(x, _15, out=shifted)
    x *= _FACTORS[1]
    x ^= np.right_shift(x, _16, out=shifted)


class _Scratch(threading.local):
    """Room for a row: fresh memory for each pass would cost more than the pass."""

    def __init__(self) -> None:
        self.resize(0)

    def resize(self, vocab_size: int) -> None:
        self.ids = np.arange(vocab_size, dtype=np.uint32)
        self.hashed = np.empty_like(self.ids)
        self.shifted = np.empty_like(self.ids)
        self.uniform = self.shifted.view(np.float32)  # one after the other
        self.floats = np.empty(vocab_size, dtype=np.float32)


_room = _Scratch()


def _scratch(vocab_size: int) -> _Scratch:
    if len(_room.ids) != vocab_size:
        _room.resize(vocab_size)
    return _room
