"""What each rank of a worker is given."""

import dataclasses
from pathlib import Path
from typing import Literal

import pytest

from deploy.leaf_configs import engine_config
from deploy.rank_config import RankConfig
from deploy.ranks import of_rank, rank_processes
from deploy.worker_config import WorkerConfig
from engine.config import ModelError
from engine.tp.shard import Shard
from runtime import flags

CONFIG = WorkerConfig(role="decode", model_path="m", cores=("4", "5", "6"), tensor_parallel=2)


def test_ranks_divide_the_cores() -> None:
    assert [of_rank(CONFIG, rank).cores for rank in range(2)] == [("4", "5"), ("6",)]
    many = dataclasses.replace(CONFIG, tensor_parallel=4)
    assert [of_rank(many, rank).cores for rank in range(4)] == [("4",), ("5",), ("6",), ("4",)]
    unpinned = dataclasses.replace(CONFIG, cores=())
    assert of_rank(unpinned, 1).cores == ()


def test_threads_of_a_rank_are_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(9)))
    first, second = (engine_config(of_rank(CONFIG, r), Shard(r, 2)).num_threads for r in range(2))
    assert (first, second) == (2, 1)
    unpinned = dataclasses.replace(CONFIG, cores=())
    assert engine_config(unpinned, Shard(1, 2)).num_threads == 4
    assert engine_config(unpinned, Shard()).num_threads is None


def test_streams_on_a_decode_worker_wait_for_smaller_chunks_of_prompts() -> None:
    def objective(role: Literal["decode", "both"], given: float | None = None) -> float | None:
        return engine_config(
            WorkerConfig(role=role, model_path="m", tpot_slo_ms=given), Shard()
        ).tpot_slo_ms

    assert (objective("decode"), objective("both")) == (30, 90)
    assert [objective("decode", 50), objective("decode", 0)] == [50, None]


def test_a_rank_reads_its_workers_flags() -> None:
    fields = {field.name: getattr(CONFIG, field.name) for field in dataclasses.fields(CONFIG)}
    config = RankConfig(**fields, rank=1, steps_fd=5, handoff_fd=6, rendezvous="/somewhere")
    argv = flags.to_argv(config)
    environ = {"BATON_TOKEN_BUDGET": "7", "BATON_CORES": "0"}
    assert flags.parse(RankConfig, argv, prog="x", description="y", environ=environ) == config


def test_one_rank_is_nobody_else() -> None:
    with rank_processes(dataclasses.replace(CONFIG, tensor_parallel=1)) as processes:
        assert processes.others == ()
        assert processes.shard == Shard()


@pytest.mark.parametrize(("num_ranks", "reason"), [(3, "3 ranks for 2 KV heads"), (0, "least 1")])
def test_what_ranks_cannot_do_is_said_before_any_is_started(
    tiny_llama: Path, num_ranks: int, reason: str
) -> None:
    config = WorkerConfig(role="decode", model_path=str(tiny_llama), tensor_parallel=num_ranks)
    with pytest.raises(ModelError, match=reason), rank_processes(config):
        pytest.fail("it started")
