"""The nursery, and the cluster whose messages tests harm."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.harmed import HarmedCluster
from tests.e2e.nursery import close_nursery, nursery


@pytest.fixture(scope="session", autouse=True)
def nursery_lives() -> Iterator[None]:
    """It loads while the first tests prepare their models."""
    nursery()
    yield
    close_nursery()


@pytest.fixture(scope="module")
def harmed(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HarmedCluster]:
    cluster = HarmedCluster(tmp_path_factory.mktemp("harmed"), tiny_llama)
    try:
        cluster.wait_ready()
        yield cluster
    finally:
        cluster.close()
