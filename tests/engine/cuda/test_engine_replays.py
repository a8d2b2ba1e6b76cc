"""A whole engine whose decode steps are replayed, on the CPU: the tokens of one whose steps run as
they come, in float32, batched and preempted."""

from typing import Any

import pytest

import engine.kv_room
from engine.attention import GatherAttention
from engine.cuda.capture import Capture, Work
from engine.cuda.graphed_model import GraphedModel
from engine.cuda.load import with_graphs
from engine.decoder import load_decoder
from engine.engine_config import EngineConfig
from engine.kv_cache import KVCache
from engine.model import Model
from tests.engine.conftest import TinyModel
from tests.engine.cuda.recorder import record
from tests.engine.test_engine import SAMPLING, alone, requests_for, running

SMALL = {"block_size": 4, "num_blocks": 27}


class Replays:
    """Counts them."""

    num = 0

    def capture(self, work: Work) -> Work:
        replay = record(work)

        def counted() -> None:
            self.num += 1
            replay()

        return counted


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> Replays:
    """From now on engines have graphs."""
    replays = Replays()
    capture: Capture = replays.capture

    def load(config: EngineConfig, *args: Any) -> GraphedModel:
        model = load_decoder(config, *args)
        assert isinstance(model, Model)
        return with_graphs(model, GatherAttention, config, capture)

    def with_scratch(*args: Any) -> KVCache:
        model, num_blocks, block_size, dtype, device, _ = args
        return KVCache(model, num_blocks, block_size, dtype, device, has_scratch=True)

    monkeypatch.setattr("engine.engine.load_decoder", load)
    monkeypatch.setattr(engine.kv_room, "KVCache", with_scratch)
    return replays


@pytest.mark.parametrize("sampling", SAMPLING[::2])
def test_tokens_are_the_same(
    tiny_llama: TinyModel, sampling: dict[str, float], request: pytest.FixtureRequest
) -> None:
    """In a pool so small that some give way."""
    requests = requests_for(sampling)
    expected = alone(tiny_llama.folder, requests)
    replays: Replays = request.getfixturevalue("replays")
    with running(tiny_llama.folder, **SMALL) as rig:
        assert rig.run(*requests) == expected
        assert rig.engine.stats().preemptions > 0
    assert replays.num > 20
