"""A prefill and a decode worker, behind a router of each mode, for all tests of a file. What
strangers send to the ports keeps a thread of UCX busy for seconds, beside no other file's tests."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.cluster import Cluster


@pytest.fixture(scope="module")
def cluster(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("pair")
    cluster = Cluster(folder, tiny_llama, dtype="float32", num_blocks=100, max_model_len=1024)
    try:
        cluster.worker("prefill", cores=0)
        cluster.worker("decode", cores=1)
        cluster.router()
        cluster.router(mode="colocated")
        cluster.wait_ready()
        yield cluster
    finally:
        cluster.close()
