"""A worker of two ranks, as processes: what it says, how its memory is told, and that all of it
ends with any of them."""

import asyncio
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.cluster import Cluster, WorkerProcess, children_of
from tests.e2e.reference import Reference, prompts_of
from tests.e2e.tokens import token_client

NUM_OUTPUTS = 8
AT_ONCE_S = 2.0
FLAGS = {"dtype": "float32", "num_blocks": 128, "max_model_len": 640, "token_budget": 128}


@pytest.fixture(scope="module")
def worker(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerProcess]:
    cluster = Cluster(tmp_path_factory.mktemp("ranks"), tiny_llama, **FLAGS)
    try:
        worker = cluster.worker("decode", tensor_parallel=2, cores="0,1")
        cluster.wait_ready()
        yield worker
    finally:
        cluster.close()


def other_rank(worker: WorkerProcess) -> int:
    (pid,) = children_of(worker.pid)
    return pid


def wait_gone(pid: int) -> None:
    deadline = time.monotonic() + AT_ONCE_S
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < deadline, f"{pid} is still there"
        time.sleep(0.01)


async def test_tokens_are_those_of_transformers(worker: WorkerProcess, tiny_llama: Path) -> None:
    expected = Reference(tiny_llama, NUM_OUTPUTS)
    prompts = prompts_of((1, 15, 64, 129, 400), seed=11)
    async with token_client([], [worker], mode="colocated") as client:
        answers = await asyncio.gather(*(client.generate(p, NUM_OUTPUTS) for p in prompts))
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer == expected(prompt)


def test_memory_of_every_rank_is_told(worker: WorkerProcess) -> None:
    metrics = worker.metrics()
    assert metrics.value("baton_worker_ranks") == 2
    pools = [metrics.value("baton_kv_pool_bytes", rank=rank) for rank in ("0", "1")]
    assert pools[0] == pools[1] == 128 * 16 * 2 * 2 * 1 * 16 * 4  # one KV head each
    name = "baton_rank_resident_memory_bytes"
    resident = [metrics.value(name, rank=rank) for rank in ("0", "1")]
    assert resident[0] == pytest.approx(metrics.value("process_resident_memory_bytes"), rel=0.2)
    assert resident[1] > 100e6
    assert all(metrics.value("baton_rank_cpu_seconds_total", rank=r) > 0 for r in ("0", "1"))


def test_signals_that_end_a_worker_do_not_end_its_ranks(worker: WorkerProcess) -> None:
    """They come to a process group as a whole; rank 0 drains first."""
    for signum in (signal.SIGTERM, signal.SIGINT):
        os.kill(other_rank(worker), signum)
    time.sleep(0.2)
    assert worker.is_running


async def test_a_worker_ends_with_its_rank(worker: WorkerProcess) -> None:
    async with token_client([], [worker], mode="colocated") as client:
        asking = asyncio.create_task(client.generate(list(range(20, 60)), 500))
        await asyncio.sleep(0.5)
        assert not asking.done()
        os.kill(other_rank(worker), signal.SIGKILL)
        status = await asyncio.to_thread(worker._popen.wait, AT_ONCE_S)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
    assert status == 1
    assert "rank 1 ended" in worker.tail()


def test_a_rank_ends_with_its_worker(worker: WorkerProcess) -> None:
    worker.start_again()
    worker.wait_ready()
    pid = other_rank(worker)
    worker.kill()
    wait_gone(pid)


def test_why_a_rank_cannot_start_is_why_its_worker_cannot(tiny_llama: Path, tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, tiny_llama, **FLAGS)
    worker = cluster.worker("decode", tensor_parallel=2, cores="0,99999")
    try:
        assert worker._popen.wait(30) == 2
    except subprocess.TimeoutExpired:
        worker.kill()
        raise
    assert "cannot start" in worker.tail()
    assert "rank 1 failed: [Errno 22]" in worker.tail()
