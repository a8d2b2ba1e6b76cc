"""The pool's copies against plain indexing: any range, any blocks, any heads."""

from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.config import ModelConfig, RopeConfig
from engine.kv_cache import KVCache

CPU = torch.device("cpu")
LAYERS, HEADS, HEAD_DIM, NUM_BLOCKS = 3, 4, 2, 12
CONFIG = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=8,
    hidden_size=8,
    intermediate_size=8,
    num_layers=LAYERS,
    num_heads=HEADS,
    num_kv_heads=HEADS,
    head_dim=HEAD_DIM,
    max_position_embeddings=64,
    rms_norm_eps=1e-6,
    rope=RopeConfig("default", 10_000.0),
    qkv_bias=False,
    o_bias=False,
    mlp_bias=False,
    qk_norm=False,
    tie_word_embeddings=True,
    windows=(None,) * LAYERS,
    dtype=torch.bfloat16,
    eos_token_ids=frozenset(),
)


@dataclass(frozen=True)
class Part:
    first_token: int
    num_tokens: int
    first_layer: int = 0
    num_layers: int = LAYERS
    first_head: int = 0
    num_heads: int = HEADS

    @property
    def tokens(self) -> slice:
        return slice(self.first_token, self.first_token + self.num_tokens)

    @property
    def layers(self) -> slice:
        return slice(self.first_layer, self.first_layer + self.num_layers)

    @property
    def heads(self) -> slice:
        return slice(self.first_head, self.first_head + self.num_heads)


def make(block_size: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> KVCache:
    """A pool in which every value is its own."""
    kv = KVCache(CONFIG, NUM_BLOCKS, block_size, dtype, CPU)
    values = torch.randperm(kv.data.numel(), generator=torch.Generator().manual_seed(seed))
    kv.data.copy_(values.view(kv.data.shape))
    return kv


def sequence(kv: KVCache, table: list[int]) -> Tensor:
    """[layers, 2, tokens, heads, head_dim], a copy."""
    return kv.data[:, :, table].flatten(2, 3)


def buffer(kv: KVCache, part: Part) -> Tensor:
    return torch.zeros(kv.payload_nbytes(part), dtype=torch.uint8)


@st.composite
def ranges(draw: st.DrawFn) -> tuple[int, list[int], Part]:
    """(block size, block table, a range inside it)"""

    def span(length: int) -> tuple[int, int]:
        first = draw(st.integers(0, length - 1))
        return first, draw(st.integers(1, length - first))

    block_size = draw(st.sampled_from([1, 3, 4]))
    table = draw(st.permutations(range(NUM_BLOCKS)))[: draw(st.integers(1, NUM_BLOCKS))]
    return block_size, table, Part(*span(len(table) * block_size), *span(LAYERS), *span(HEADS))


@settings(deadline=None, max_examples=150)
@given(ranges(), st.sampled_from([torch.bfloat16, torch.float32]))
def test_gather_is_plain_indexing(case: tuple[int, list[int], Part], dtype: torch.dtype) -> None:
    block_size, table, part = case
    kv = make(block_size, dtype)
    expected = sequence(kv, table)[part.layers, :, part.tokens, part.heads].contiguous()
    out = buffer(kv, part)
    kv.gather(table, part, out)
    assert torch.equal(out, expected.view(torch.uint8).flatten())


@settings(deadline=None, max_examples=150)
@given(ranges())
def test_scatter_writes_its_range_and_nothing_else(case: tuple[int, list[int], Part]) -> None:
    block_size, table, part = case
    source, kv = make(block_size, seed=1), make(block_size, seed=2)
    payload = buffer(source, part)
    source.gather(table, part, payload)
    expected = kv.data.clone()
    installed = expected[:, :, table].flatten(2, 3)
    installed[part.layers, :, part.tokens, part.heads] = sequence(source, table)[
        part.layers, :, part.tokens, part.heads
    ]
    expected[:, :, table] = installed.view(LAYERS, 2, len(table), block_size, HEADS, HEAD_DIM)
    kv.scatter(table, part, payload)
    assert torch.equal(kv.data, expected)


@settings(deadline=None, max_examples=50)
@given(ranges(), st.data())
def test_scatter_leaves_out_what_it_is_to_skip(
    case: tuple[int, list[int], Part], data: st.DataObject
) -> None:
    """As a scatter of the rest of the range alone."""
    block_size, table, part = case
    skip = data.draw(st.integers(0, part.num_tokens - 1))
    rest = replace(part, first_token=part.first_token + skip, num_tokens=part.num_tokens - skip)
    source, kv, expected = (
        make(block_size, seed=1),
        make(block_size, seed=2),
        make(block_size, seed=2),
    )
    payload, rest_payload = buffer(source, part), buffer(source, rest)
    source.gather(table, part, payload)
    source.gather(table, rest, rest_payload)
    kv.scatter(table, part, payload, skip)
    expected.scatter(table, rest, rest_payload)
    assert torch.equal(kv.data, expected.data)


def test_block_sizes_may_differ_on_the_two_sides() -> None:
    source, sink = make(4), make(3, seed=7)
    part = Part(0, 29)
    payload = buffer(source, part)
    source.gather([5, 0, 3, 8, 1, 2, 11, 9], part, payload)
    sink.scatter([11, 4, 2, 0, 6, 7, 8, 10, 1, 3], part, payload)
    ours = sequence(sink, [11, 4, 2, 0, 6, 7, 8, 10, 1, 3])[:, :, :29]
    assert torch.equal(ours, sequence(source, [5, 0, 3, 8, 1, 2, 11, 9])[:, :, :29])


def test_written_tokens_are_where_their_slots_say() -> None:
    kv = KVCache(CONFIG, NUM_BLOCKS, 4, torch.float32, CPU)
    assert kv.data.count_nonzero() == 0
    k, v = torch.randn(2, 3, HEADS, HEAD_DIM)
    kv.write(1, k, v, torch.tensor([7, 46, 0]))
    keys, values = kv.layer(1)
    for cache, written in ((keys, k), (values, v)):
        assert torch.equal(cache.flatten(0, 1)[[7, 46, 0]], written)
    assert kv.data.count_nonzero() == 2 * k.numel()


def test_a_payload_of_the_wrong_size_is_our_bug() -> None:
    kv = make(4)
    with pytest.raises(AssertionError):
        kv.gather([0, 1], Part(0, 8), torch.zeros(3, dtype=torch.uint8))


def test_blocks_are_copied_whole() -> None:
    """All layers, K and V; nothing else changes, and one source may have many targets."""
    cache = KVCache(CONFIG, NUM_BLOCKS, 4, torch.float32, CPU)
    cache.data.copy_(torch.randn(cache.data.shape))
    expected = cache.data.clone()
    for source, target in ((3, 0), (3, 5), (7, 11)):
        expected[:, :, target] = expected[:, :, source]
    cache.copy_blocks([(3, 0), (3, 5), (7, 11)])
    assert torch.equal(cache.data, expected)
