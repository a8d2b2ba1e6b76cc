"""The draw of many rows by the team of threads: engine/cpu/draw.py behind the interface of
host_sampler.draw_tokens. Engine thread only.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt

from engine.cpu.draw import SCRATCH_ROWS, Doubles, Uint32s, draw, padded
from engine.cpu.layout import Floats, Ints
from engine.cpu.likely import Ids
from engine.cpu.sync import COUNTERS_PER_REGION
from engine.cpu.team import Team
from engine.request import SamplingParams

_FEW = 3  # rows that are drawn sooner than another thread wakes up


class KernelSampler:
    """See the module. Compiles, if that was not done before on this machine."""

    def __init__(self, vocab_size: int, team: Team) -> None:
        self._team = team
        size = (team.num_threads, padded(vocab_size))
        self._floats: Floats = np.zeros((size[0], SCRATCH_ROWS, size[1]), dtype=np.float32)
        self._ids: Ids = np.zeros(size, dtype=np.int32)
        self._draw(_alone, np.zeros((1, vocab_size), dtype=np.float32), [0], [_ANY], _KEY, _OUT)

    def draw_tokens(
        self,
        logits: npt.NDArray[np.float32],
        rows: Sequence[int],
        params: Sequence[SamplingParams],
        keys: npt.NDArray[np.uint64],
        out: npt.NDArray[np.int64],
    ) -> None:
        """As host_sampler.draw_tokens."""
        run = _alone if len(rows) <= _FEW else self._team.run
        self._draw(run, np.ascontiguousarray(logits), rows, params, keys, out)

    def _draw(
        self,
        run: Callable[[Callable[[int], None]], None],
        logits: npt.NDArray[np.float32],
        rows: Sequence[int],
        params: Sequence[SamplingParams],
        keys: npt.NDArray[np.uint64],
        out: npt.NDArray[np.int64],
    ) -> None:
        run(
            partial(
                _run,
                np.zeros(COUNTERS_PER_REGION, dtype=np.int64),
                logits,
                np.array(rows, dtype=np.int64),
                np.array([p.temperature for p in params], dtype=np.float32),
                np.array([p.top_k for p in params], dtype=np.int64),
                np.array([p.top_p for p in params], dtype=np.float64),
                np.array([_log(p.min_p) for p in params], dtype=np.float64),
                keys.view(np.uint32).reshape(-1, 2),
                self._floats,
                self._ids,
                out,
            )
        )


_ANY = SamplingParams(max_tokens=1, temperature=1.0)
_KEY: npt.NDArray[np.uint64] = np.zeros(1, dtype=np.uint64)
_OUT: Ints = np.zeros(1, dtype=np.int64)


def _alone(function: Callable[[int], None]) -> None:
    function(0)


def _log(min_p: float) -> float:
    return math.log(min_p) if min_p > 0.0 else -math.inf


def _run(
    counters: Ints,
    logits: Floats,
    rows: Ints,
    temperatures: Floats,
    top_ks: Ints,
    top_ps: Doubles,
    log_min_ps: Doubles,
    keys: Uint32s,
    floats: Floats,
    ids: Ids,
    out: Ints,
    thread: int,
) -> None:
    draw(
        counters, thread, logits, rows, temperatures, top_ks, top_ps, log_min_ps, keys, floats,
        ids, out,
    )  # fmt: skip
