"""How a model is cut: every part once, evenly, and query heads with the KV head that they share."""

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.config import ModelConfig, ModelError
from engine.tp.shard import WHOLE, Shard
from tests.engine.conftest import TinyModel


def shards(size: int) -> list[Shard]:
    return [Shard(rank, size) for rank in range(size)]


@given(whole=st.integers(0, 300), size=st.integers(1, 9))
def test_cuts_are_even_and_cover_all(whole: int, size: int) -> None:
    parts = [shard.cut(whole) for shard in shards(size)]
    assert [index for part in parts for index in part] == list(range(whole))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    assert sorted(map(len, parts), reverse=True) == list(map(len, parts))


def test_three_kv_heads_on_two_ranks(tiny_llama: TinyModel) -> None:
    config = ModelConfig.from_folder(Path(tiny_llama.folder))
    config = dataclasses.replace(config, num_kv_heads=3, num_heads=9, intermediate_size=81)
    first, second = shards(2)
    assert (first.kv_heads(config), second.kv_heads(config)) == (range(2), range(2, 3))
    assert (first.heads(config), second.heads(config)) == (range(6), range(6, 9))
    parts = [shard.part_of(config) for shard in (first, second)]
    assert [(p.num_heads, p.num_kv_heads, p.intermediate_size) for p in parts] == [
        (6, 2, 41),
        (3, 1, 40),
    ]
    assert WHOLE.part_of(config) == config


def test_more_ranks_than_kv_heads_are_refused(tiny_llama: TinyModel) -> None:
    config = ModelConfig.from_folder(Path(tiny_llama.folder))
    with pytest.raises(ModelError, match="3 ranks for 2 KV heads"):
        Shard(0, 3).part_of(config)
