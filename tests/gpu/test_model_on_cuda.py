"""The model half of the engine on a CUDA device, held against itself on the CPU."""

from collections.abc import Iterator

import pytest
import torch

from engine.config import ModelConfig
from engine.kv_cache import KVCache
from engine.kv_copier import KVCopier
from engine.kv_lease import KVLease
from engine.model import Model
from engine.request import BlockId, RequestId
from engine.weights import random_weights
from tests.engine.conftest import TinyModel
from tests.engine.model_driver import ModelDriver, random_prompt
from tests.engine.test_kv_cache import CONFIG, NUM_BLOCKS, Part, make

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
BLOCK_SIZE = 4
TABLE = [5, 0, 3, 8, 1, 2, 11, 9]
PART = Part(first_token=2, num_tokens=27, first_layer=1, num_layers=2, first_head=1, num_heads=2)


def lease(block_table: list[int]) -> KVLease:
    blocks = [BlockId(block) for block in block_table]
    return KVLease(RequestId("r"), blocks, lambda _: None)


def expected_payload() -> torch.Tensor:
    """Of `make`'s pool, by the CPU."""
    kv = make(BLOCK_SIZE)
    payload = torch.zeros(kv.payload_nbytes(PART), dtype=torch.uint8)
    kv.gather(TABLE, PART, payload)
    return payload


@pytest.fixture
def kv() -> KVCache:
    """`make`'s pool, on the device."""
    cache = KVCache(CONFIG, NUM_BLOCKS, BLOCK_SIZE, torch.bfloat16, CUDA)
    cache.data.copy_(make(BLOCK_SIZE).data)
    torch.cuda.synchronize()
    return cache


@pytest.fixture
def copier(kv: KVCache) -> Iterator[KVCopier]:
    copier = KVCopier(kv)
    yield copier
    copier.close()


@pytest.mark.parametrize("tiny_model", ["llama", "qwen2", "qwen3", "mistral"], indirect=True)
def test_tokens_are_those_of_the_cpu(tiny_model: TinyModel) -> None:
    config = ModelConfig.from_folder(tiny_model.folder)
    prompts = [random_prompt(length, seed=length) for length in (1, 5, 40, 64)]
    on_cpu, on_cuda = (
        ModelDriver(
            Model(config, random_weights(config, 3, torch.float32, device)),
            config,
            torch.float32,
            device,
        ).generate(prompts, num_output=12, chunk_seed=5)
        for device in (CPU, CUDA)
    )
    assert on_cuda == on_cpu


def test_weights_have_one_digest_on_every_device() -> None:
    digests = {random_weights(CONFIG, 3, torch.bfloat16, device).digest for device in (CPU, CUDA)}
    assert len(digests) == 1


def test_gather_into_pinned_staging(copier: KVCopier) -> None:
    expected = expected_payload()
    staging = copier.allocate_staging(len(expected))
    assert torch.frombuffer(staging, dtype=torch.uint8).is_pinned()
    assert copier.gather(lease(TABLE), PART, staging).result(10) > 0
    assert bytes(staging) == expected.numpy().tobytes()


def test_scatter_from_pinned_staging(kv: KVCache, copier: KVCopier) -> None:
    expected = expected_payload()
    staging = copier.allocate_staging(len(expected))
    staging[:] = expected.numpy().tobytes()
    elsewhere = [10, 7, 6, 4, 11, 9, 2, 1]
    before = lease(elsewhere)
    copier.scatter(before, PART, staging).result(10)
    copier.wait_scatters(before)
    back = torch.zeros_like(expected)
    kv.gather(elsewhere, PART, back)
    torch.cuda.synchronize()
    assert torch.equal(back, expected)


def test_a_gather_sees_the_forward_pass_that_was_recorded(kv: KVCache, copier: KVCopier) -> None:
    """The pass still runs on the device when the copy is asked for."""
    staging = copier.allocate_staging(kv.payload_nbytes(PART))
    torch.cuda._sleep(200_000_000)  # type: ignore[no-untyped-call]  # cycles: some 100 ms
    kv.data.fill_(3)
    copier.record_compute()
    copier.gather(lease(TABLE), PART, staging).result(10)
    values = torch.frombuffer(staging, dtype=torch.uint8).view(torch.bfloat16)
    assert (values == 3).all()
