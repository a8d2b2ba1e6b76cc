"""One cluster of each model for all tests of this folder: KV goes by UCX alone in the one, and is
read where it lies in the other (kvfabric/direct.py)."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from engine.config import ModelConfig
from tests.e2e.cluster import UCX_ALONE, Cluster, RouterProcess
from tests.e2e.equivalence.relay import CHUNK, MAX_MODEL_LEN, NUM_OUTPUTS, POOL_TOKENS, Relay
from tests.e2e.reference import Reference


@pytest.fixture(scope="session", params=["tiny_llama", "smollm2"])
def relay(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Relay]:
    path: Path = request.getfixturevalue(request.param)
    cluster = Cluster(
        tmp_path_factory.mktemp("relay"),
        path,
        dtype="float32",
        max_model_len=MAX_MODEL_LEN,
        token_budget=CHUNK,
    )
    is_by_ucx = request.param == "tiny_llama"
    cluster.worker_environ = UCX_ALONE if is_by_ucx else {}
    roles = [("prefill", 16), ("prefill", 64), ("decode", 16), ("decode", 64)]
    try:
        workers = {
            (role, size): cluster.worker(
                role, block_size=size, num_blocks=POOL_TOKENS // size, cores=index % 2
            )
            for index, (role, size) in enumerate(roles)
        }
        expected = Reference(path, NUM_OUTPUTS)
        cluster.wait_ready()
        nbytes = ModelConfig.from_folder(path).kv_token_nbytes(torch.float32)
        yield Relay(workers, cluster, expected, nbytes, is_by_ucx)
    finally:
        cluster.close()


@pytest.fixture
def router(relay: Relay) -> Iterator[RouterProcess]:
    router = relay.cluster.router()
    router.wait_ready()
    router.wait_knows_all()
    yield router
    router.ask_to_end()
    router.wait_end()
