"""Ranks that come to each other, on the CPU."""

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.tp import collectives
from engine.tp.collectives import Alone, TorchCollectives
from engine.tp.shard import Shard
from tests.engine.tp.threaded_ranks import CPU

DEADLINE_S = 20.0


def together(size: int, rendezvous: Path, late_s: float = 0.0) -> list[tuple[Tensor, Tensor]]:
    """What each rank gets of a sum, and of 7 columns gathered."""

    def work(rank: int) -> tuple[Tensor, Tensor]:
        group = TorchCollectives(Shard(rank, size), CPU, rendezvous)
        if rank == 0:
            time.sleep(late_s)
        group.join()
        rows = torch.tensor([[1e8, 1.0, 3.0], [-1e8, 2.0, 5.0], [1.0, 4.0, 7.0]])
        total = group.sum(rows[rank].clone())
        columns = torch.arange(14.0).view(2, 7)[:, list(Shard(rank, size).cut(7))]
        gathered = group.gather_columns(columns, 7)
        group.close()
        return total, gathered

    with ThreadPoolExecutor(size) as pool:
        return [f.result(DEADLINE_S) for f in [pool.submit(work, r) for r in range(size)]]


@pytest.mark.parametrize("size", [2, 3])
def test_sums_and_gathered_columns(size: int, tmp_path: Path) -> None:
    answers = together(size, tmp_path / "meet")
    first, gathered = answers[0]
    assert all(torch.equal(total, first) for total, _ in answers)
    assert first.tolist() == ([1.0, 7.0, 15.0] if size == 3 else [0.0, 3.0, 8.0])
    assert torch.equal(gathered, torch.arange(14.0).view(2, 7))
    assert [part.shape[1] for _, part in answers[1:]] == [
        len(Shard(r, size).cut(7)) for r in range(1, size)
    ]


def test_a_rank_may_load_for_longer_than_a_step_may_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collectives, "STEP_TIMEOUT_S", 0.5)
    together(2, tmp_path / "meet", late_s=1.0)


def test_a_rank_that_never_comes_is_not_waited_for_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collectives, "JOIN_TIMEOUT_S", 0.3)
    with pytest.raises(RuntimeError, match=r"(?i)timeout"):
        TorchCollectives(Shard(0, 2), CPU, tmp_path / "meet").join()


def test_one_rank_has_it_all() -> None:
    part = torch.arange(6.0).view(2, 3)
    assert Alone().sum(part) is part
    assert Alone().gather_columns(part, 3) is part
