"""How much of its cores a worker gives to KV that comes in while it serves streams.

Streams feel an install only where the same cores do both: not on a card, nor where a core is left
over for it. A worker of several ranks is not paced: their parts of a transfer end together.
"""

import os
from collections.abc import Callable

from deploy.worker_config import WorkerConfig
from engine.engine import Engine
from engine.stats import EngineStats
from kvfabric.pace import Pace

_STEPS_TO_JOIN = 2.5
"""The rest of the one under way, and the one of the join, which is longer than others."""

_MOST_S = 0.25
"""Of that: senders have deadlines, and a step may have taken any time."""

_UCX_COPIES = 1.0
"""UCX copies each byte out of its queues, beside the copier's own copy and as fast."""


def check(config: WorkerConfig) -> None:
    """Raises ValueError."""
    if not 0 < config.install_share <= 1:
        raise ValueError(f"--install-share {config.install_share}: say more than 0, and at most 1")


def install_pace(config: WorkerConfig, engine: Engine) -> Pace | None:
    """None: as fast as it comes."""
    is_alone = config.tensor_parallel == 1 and config.install_share < 1
    if not is_alone or not _computes_on_all_cores(engine):
        return None
    return Pace(
        lambda: config.install_share if engine.stats().running else None,
        lambda: (1 + _UCX_COPIES) * engine.copier.busy_s,
        _Joining(engine.stats).seconds,
    )


class _Joining:
    """How long it takes to join the batch, by what steps took since the last one did."""

    def __init__(self, stats: Callable[[], EngineStats]) -> None:
        self._stats = stats
        self._steps, self._seconds, self._step_s = 0, 0.0, 0.0

    def seconds(self) -> float:
        stats = self._stats()
        steps, seconds = stats.steps - self._steps, stats.step_seconds - self._seconds
        if steps:
            self._steps, self._seconds = stats.steps, stats.step_seconds
            self._step_s = seconds / steps
        return min(_STEPS_TO_JOIN * self._step_s, _MOST_S)


def _computes_on_all_cores(engine: Engine) -> bool:
    num_threads = engine.config.num_threads  # None: as many as there are cores
    is_on_cpu = engine.config.resolve_device().type == "cpu"
    return is_on_cpu and (num_threads is None or num_threads >= len(os.sched_getaffinity(0)))
