"""Two ranks on two CUDA devices, which speak by NCCL, held against one on the CPU."""

from pathlib import Path

import pytest
import torch

from engine.engine import Engine
from engine.engine_config import EngineConfig
from engine.request import FinishReason
from engine.tp.shard import Shard
from tests.engine.conftest import TinyModel
from tests.engine.listener import Listener
from tests.engine.test_engine import alone, requests_for
from tests.engine.tp.threaded_ranks import other_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]


def on_cuda(folder: Path, **settings: int) -> EngineConfig:
    return EngineConfig(
        folder,
        device="cuda",
        dtype="float32",
        kernels="torch",
        max_model_len=256,
        nice=0,
        shard=Shard(0, 2),
        **{"num_blocks": 64, **settings},  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("tiny_model", ["llama", "qwen2", "qwen3", "mistral"], indirect=True)
@pytest.mark.parametrize("settings", [{}, {"block_size": 4, "num_blocks": 27, "token_budget": 23}])
def test_tokens_are_those_of_one_cpu(tiny_model: TinyModel, settings: dict[str, int]) -> None:
    """Batched; also chunked and preempted."""
    requests, listener = requests_for({}), Listener()
    config = on_cuda(tiny_model.folder, **settings)
    with other_ranks(config) as ranks:
        engine = Engine(config, listener, ranks=ranks)
        engine.start()
        try:
            for request in requests:
                engine.submit(request)
            for request in requests:
                assert listener.wait_ended(request.request_id) is FinishReason.LENGTH
            said = [listener.tokens(request.request_id) for request in requests]
        finally:
            engine.stop()
    assert engine.failure is None
    assert said == alone(tiny_model.folder, requests)
