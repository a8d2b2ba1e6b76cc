"""One cluster for all tests of this folder, whole before each and idle after."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.cluster import Cluster
from tests.e2e.slow_relay import ADMIN_TOKEN, CHUNK, INACTIVITY_S, POOL_BLOCKS
from tests.ports import free_port


@pytest.fixture(scope="session")
def slow_relay(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = Cluster(
        tmp_path_factory.mktemp("faults"),
        tiny_llama,
        dtype="float32",
        num_blocks=POOL_BLOCKS,
        max_model_len=1600,
        transfer_timeout_s=3,
        max_local_tail=0,  # what is lost is asked for again, so that it can be told who computed it
    )
    try:
        for index, role in enumerate(("prefill", "decode", "prefill", "decode")):
            cluster.worker(role, cores=index % 2, token_budget=CHUNK if role == "prefill" else 512)
        token_file = cluster.run_dir / "admin-token"
        token_file.write_text(ADMIN_TOKEN)
        cluster.router(
            inactivity_s=INACTIVITY_S,
            status_interval_s=0.1,
            admin_port=free_port(),
            admin_token_file=token_file,
        )
        cluster.wait_ready()
        yield cluster
    finally:
        cluster.close()


@pytest.fixture
def cluster(slow_relay: Cluster) -> Iterator[Cluster]:
    """All workers alive before, and nothing held after."""
    yield slow_relay
    killed = [worker for worker in slow_relay.workers if not worker.is_running]
    for worker in killed:
        worker.start_again()
    for worker in killed:
        worker.wait_ready()
    slow_relay.assert_all_back()
