"""KV of prompts handed over between workers on a CUDA device and on the CPU, real processes, over
UCX alone and by the short way within a host, which reads the other's pinned memory
(kvfabric/direct.py): tokens are those of transformers on the CPU."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from engine.config import ModelConfig
from tests.e2e.cluster import UCX_ALONE, Cluster, WorkerProcess
from tests.e2e.equivalence.relay import CHUNK, MAX_MODEL_LEN, NUM_OUTPUTS, Relay
from tests.e2e.reference import Reference, prompts_of
from tests.e2e.tokens import token_client

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DEVICES = ("cuda", "cpu")
PAIRS = [("cuda", "cuda"), ("cpu", "cuda"), ("cuda", "cpu")]
BLOCK_SIZES = {"prefill": 16, "decode": 32}
LENGTHS = (1, 31, 32, 33, 2 * CHUNK, 3 * CHUNK + 5, MAX_MODEL_LEN - NUM_OUTPUTS)
POOL_TOKENS = 4800
A_PROCESS_OF_ITS_OWN = ("env",)
"""What is forked off another cannot begin with CUDA."""


@pytest.fixture(scope="module", params=[False, True], ids=["direct", "ucx"])
def relay(
    request: pytest.FixtureRequest, smollm2: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Relay]:
    """Workers by role and the index of their device."""
    flags = {"dtype": "float32", "kernels": "torch", "max_model_len": MAX_MODEL_LEN}
    cluster = Cluster(tmp_path_factory.mktemp("on-cuda"), smollm2, token_budget=CHUNK, **flags)
    cluster.worker_environ = UCX_ALONE if request.param else {}
    try:
        workers: dict[tuple[str, int], WorkerProcess] = {
            (role, index): cluster.worker(
                role,
                A_PROCESS_OF_ITS_OWN,
                device=device,
                block_size=size,
                num_blocks=POOL_TOKENS // size,
            )
            for role, size in BLOCK_SIZES.items()
            for index, device in enumerate(DEVICES)
        }
        expected = Reference(smollm2, NUM_OUTPUTS)
        cluster.wait_ready()
        nbytes = ModelConfig.from_folder(smollm2).kv_token_nbytes(torch.float32)
        yield Relay(workers, cluster, expected, nbytes, request.param)
    finally:
        cluster.close()


@pytest.mark.parametrize(("prefill_on", "decode_on"), PAIRS)
async def test_relayed_tokens_are_those_of_transformers(
    relay: Relay, prefill_on: str, decode_on: str
) -> None:
    prefill = relay.workers["prefill", DEVICES.index(prefill_on)]
    decode = relay.workers["decode", DEVICES.index(decode_on)]
    prompts, salt = prompts_of(LENGTHS, seed=11), f"{prefill_on} to {decode_on}"
    before = decode.metrics()
    async with token_client([prefill], [decode]) as client:
        answers = await asyncio.gather(
            *(client.generate(p, NUM_OUTPUTS, cache_salt=salt) for p in prompts)
        )
        assert client.retries("prefill") == client.retries("decode") == 0
    assert answers == [relay.expected(prompt) for prompt in prompts]
    after, name = decode.metrics(), "baton_handoff_bytes_total"
    received = after.value(name, direction="received") - before.value(name, direction="received")
    assert received == sum(LENGTHS) * relay.token_nbytes
    assert after.value("baton_fabric_transport", transport="cma") == (not relay.is_by_ucx)
    relay.cluster.assert_all_back()
