"""Which workers take KV in at a pace, and when."""

import os
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from deploy.install_pace import check, install_pace
from deploy.worker_config import WorkerConfig
from engine.engine import Engine

CORES = len(os.sched_getaffinity(0))


def config(**changes: Any) -> WorkerConfig:
    return WorkerConfig(**{"role": "decode", "model_path": "m", **changes})


def engine(num_threads: int | None = CORES, device: str = "cpu", running: int = 1) -> Engine:
    """As far as it is asked."""
    settings = SimpleNamespace(num_threads=num_threads, resolve_device=lambda: torch.device(device))
    stats = SimpleNamespace(running=running, steps=0, step_seconds=0.0)
    copier = SimpleNamespace(busy_s=0.0)
    return cast(Engine, SimpleNamespace(config=settings, stats=lambda: stats, copier=copier))


def test_a_decode_worker_whose_cores_all_compute_is_paced_while_streams_run() -> None:
    for num_threads in (CORES, None):
        pace = install_pace(config(), engine(num_threads))
        assert pace is not None
        assert pace.is_on
        idle = install_pace(config(), engine(num_threads, running=0))
        assert idle is not None
        assert not idle.is_on


def test_a_join_is_given_as_long_as_steps_take_now() -> None:
    worker = engine()
    stats = cast(Any, worker.stats())
    pace = install_pace(config(), worker)
    assert pace is not None
    for steps, step_s, join_s in ((100, 0.02, 0.05), (3, 0.04, 0.1), (0, 0.04, 0.1), (9, 2, 0.25)):
        stats.steps += steps
        stats.step_seconds += steps * step_s
        pace.complete()
        assert pace.pause_s() == pytest.approx(join_s, abs=0.02), "but never a deadline long"


def test_nobody_else_is() -> None:
    assert install_pace(config(tensor_parallel=2), engine()) is None
    assert install_pace(config(install_share=1.0), engine()) is None
    assert install_pace(config(), engine(num_threads=CORES - 1 or -1)) is None  # one is left
    assert install_pace(config(), engine(device="cuda")) is None


@pytest.mark.parametrize("share", [0.0, -0.1, 1.5])
def test_a_share_that_is_none_is_refused_by_name(share: float) -> None:
    with pytest.raises(ValueError, match="--install-share"):
        check(config(install_share=share))
    check(config())
