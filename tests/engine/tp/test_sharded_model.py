"""Ranks that compute one model together: the logits and tokens of one that is alone."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.batch import BatchRow, PackedBatch
from engine.config import ModelConfig
from engine.engine_config import EngineConfig
from engine.kv_cache import KVCache
from engine.kv_room import open_pool
from engine.layer_groups import LayerGroups
from engine.model import Model
from engine.tp import rank
from engine.tp.shard import Shard
from engine.weights import load_weights
from tests.engine.conftest import TinyModel
from tests.engine.model_driver import BLOCK_SIZE, NUM_BLOCKS, ModelDriver, random_prompt
from tests.engine.tp.threaded_ranks import CPU, other_ranks

FAMILIES = ["llama", "llama3", "qwen2", "qwen3", "mistral", "uneven-llama"]


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest, tiny_models: Callable[[str], TinyModel]) -> TinyModel:
    return tiny_models(request.param)


def alone(model: TinyModel) -> ModelDriver:
    config = ModelConfig.from_folder(model.folder)
    weights = load_weights(model.folder, config, torch.float32, CPU)
    return ModelDriver(Model(config, weights), config, torch.float32, CPU)


@contextmanager
def together(model: TinyModel, size: int) -> Iterator[ModelDriver]:
    """Rank 0's driver."""
    shard = Shard(0, size)
    settings = EngineConfig(
        model.folder,
        device="cpu",
        dtype="float32",
        block_size=BLOCK_SIZE,
        num_blocks=NUM_BLOCKS,
        num_threads=1,
        nice=0,
        shard=shard,
    )
    config = ModelConfig.from_folder(model.folder)
    with other_ranks(settings) as ranks:
        weights = load_weights(model.folder, config, torch.float32, CPU, shard)
        decoder = Model(config, weights, shard=shard, collectives=ranks.collectives)
        ranks.join(decoder.digest, NUM_BLOCKS)
        own = shard.part_of(config)
        yield ModelDriver(decoder, own, torch.float32, CPU, ranks=ranks)


def stepwise(driver: ModelDriver, prompt: list[int]) -> list[Tensor]:
    seq = driver.add(prompt, len(prompt))
    return [driver.step([(seq, n)])[0] for n in (7, 16, 1, 1, 30, 2, 4)]


def test_logits_and_tokens_are_those_of_one_rank(family: TinyModel) -> None:
    """Chunked prefills and decodes of several sequences share steps."""
    prompt = random_prompt(61, seed=1)
    prompts = [random_prompt(length, seed=length) for length in (1, 5, 23, 40, 64)]
    one = alone(family)
    with together(family, 2) as two:
        assert two.kv.data.shape[4] == (one.kv.data.shape[4] + 1) // 2
        for ours, whole in zip(stepwise(two, prompt), stepwise(one, prompt), strict=True):
            torch.testing.assert_close(ours, whole, atol=1e-4, rtol=1e-4)
        assert two.generate(prompts, 12, chunk_seed=5) == one.generate(prompts, 12, chunk_seed=5)


def test_three_ranks(tiny_models: Callable[[str], TinyModel]) -> None:
    model = tiny_models("uneven-llama")
    prompts = [random_prompt(length, seed=length) for length in (5, 40)]
    with together(model, 3) as three:
        assert three.kv.data.shape[4] == 1
        assert three.generate(prompts, 8, chunk_seed=2) == alone(model).generate(prompts, 8, 2)


def test_a_row_does_not_depend_on_those_beside_it(
    tiny_models: Callable[[str], TinyModel],
) -> None:
    """Bit for bit, as the sum over the ranks has one order."""
    prompt, other = random_prompt(20, seed=3), random_prompt(31, seed=4)
    with together(tiny_models("uneven-llama"), 3) as three:
        (by_itself,) = three.step([(three.add(prompt, 20), 20)])
        beside, _ = three.step([(three.add(prompt, 20), 20), (three.add(other, 31), 31)])
    assert torch.equal(by_itself, beside)


def test_layers_that_rank_0_tells_of_are_there_on_all(
    tiny_models: Callable[[str], TinyModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However far another rank is behind: its copier reads them at once."""
    others: list[KVCache] = []

    def open_slowly(*args: Any) -> KVCache:
        kv = open_pool(*args)
        write = kv.write

        def slow_write(*args: Any) -> None:
            time.sleep(0.03)
            write(*args)

        monkeypatch.setattr(kv, "write", slow_write)
        others.append(kv)
        return kv

    monkeypatch.setattr(rank, "open_pool", open_slowly)
    told: dict[int, list[Tensor]] = {}
    row = BatchRow(np.arange(40), 0, np.arange(40 // BLOCK_SIZE + 1), True)
    with together(tiny_models("uneven-llama"), 3) as three:
        assert three.kv.data.shape[0] == 3
        packed = PackedBatch.of([row], BLOCK_SIZE)
        for ends in ((1, 2, 3), (2, 3), (3,)):
            for kv in (three.kv, *others):
                kv.data.zero_()

            def tell(num_layers: int) -> None:
                told[num_layers] = [kv.data[:num_layers].clone() for kv in others]

            three._ranks.forward(packed)
            three.model.forward(packed.to(CPU), three.kv, LayerGroups(ends, tell))
            assert tuple(told) == ends
            for num_layers, seen in told.items():
                for kv, data in zip(others, seen, strict=True):
                    assert data.any()
                    assert torch.equal(kv.data[:num_layers], data)
            told.clear()
