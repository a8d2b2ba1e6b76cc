"""On a card: FlashInfer against the reference, captured steps against the same steps as they come,
and that a decode step asks the device nothing."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.attention import GatherAttention
from engine.batch import BatchInput, BatchRow
from engine.config import ModelConfig
from engine.cuda.capture import cuda_capture
from engine.cuda.flashinfer_attention import FlashInfer
from engine.cuda.flashinfer_library import unsupported
from engine.cuda.graphed_model import GraphedModel
from engine.cuda.load import open_flashinfer, with_graphs
from engine.engine import Engine
from engine.engine_config import EngineConfig
from engine.kv_cache import KVCache
from engine.kv_room import open_pool
from engine.model import Model
from engine.request import RequestId
from engine.weights import random_weights
from tests.engine.conftest import TinyModel
from tests.engine.listener import Listener
from tests.engine.model_driver import ModelDriver, random_prompt
from tests.engine.test_engine import SAMPLING, Rig, requests_for

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CUDA = torch.device("cuda")
KINDS = ("torch", "flashinfer")
ROWS = ((1, 1), (1, 13), (1, 700), (1, 64), (9, 9), (5, 40), (1, 65), (300, 620))
"""(new tokens, keys), decodes first, as the scheduler has them."""


@pytest.fixture
def config(wide_llama: TinyModel) -> ModelConfig:
    """Heads of 64, windowed layers among the others."""
    config = ModelConfig.from_folder(wide_llama.folder)
    return replace(config, windows=(24, *config.windows[1:]))


def flashinfer(config: ModelConfig, block_size: int) -> FlashInfer:
    if reason := unsupported(config, torch.bfloat16):
        pytest.skip(reason)
    return open_flashinfer(config, torch.bfloat16, CUDA, block_size)


def random_kv(config: ModelConfig, block_size: int) -> KVCache:
    kv = KVCache(config, 2048 // block_size, block_size, torch.bfloat16, CUDA, has_scratch=True)
    kv.data.normal_(generator=torch.Generator(CUDA).manual_seed(4))
    return kv


def build(rows: tuple[tuple[int, int], ...], kv: KVCache) -> BatchInput:
    free = np.random.default_rng(8).permutation(kv.num_blocks)
    parts, first = [], 0
    for num_new, keys in rows:
        end = first - (-keys // kv.block_size)
        token_ids = np.zeros(num_new, dtype=np.int64)
        parts.append(BatchRow(token_ids, keys - num_new, free[first:end], wants_logits=True))
        first = end
    return BatchInput.build(parts, kv.block_size, CUDA)


@pytest.mark.parametrize("window", [None, 1, 24, 300])
@pytest.mark.parametrize("block_size", [1, 4, 16, 64])
def test_flashinfer_attends_as_the_reference(
    config: ModelConfig, block_size: int, window: int | None
) -> None:
    """bfloat16: an output is rounded to 8 bits, of values of order 1."""
    kv = random_kv(config, block_size)
    batch = build(ROWS, kv)
    shape = (len(batch.input_ids), config.num_heads, config.head_dim)
    q = torch.randn(shape, dtype=torch.bfloat16, device=CUDA)
    out = flashinfer(config, block_size)(batch, kv)(0, q, window)
    torch.testing.assert_close(out, GatherAttention(batch, kv)(0, q, window), atol=0.03, rtol=0.03)


def test_plans_of_steps_that_nobody_waits_for(config: ModelConfig) -> None:
    """The host is far ahead of the device, and plans the next step meanwhile."""
    kv = random_kv(config, 16)
    attention = flashinfer(config, 16)
    batches = [build(ROWS[index % 3 :], kv) for index in range(12)]
    queries = [
        torch.randn(
            (len(batch.input_ids), config.num_heads, config.head_dim),
            dtype=torch.bfloat16,
            device=CUDA,
        )
        for batch in batches
    ]
    pairs = list(zip(batches, queries, strict=True))
    expected = [GatherAttention(batch, kv)(0, q, None) for batch, q in pairs]
    torch.cuda.synchronize()
    torch.cuda._sleep(400_000_000)  # type: ignore[no-untyped-call]  # cycles: some 200 ms
    outs = [attention(batch, kv)(0, q, None) for batch, q in pairs]
    for out, reference in zip(outs, expected, strict=True):
        torch.testing.assert_close(out, reference, atol=0.03, rtol=0.03)


def load(config: ModelConfig, tiny: TinyModel, kind: str) -> tuple[Model, GraphedModel]:
    """The model as it comes, and replayed; 9 sequences of 400 tokens at the most."""
    attention = flashinfer(config, 16) if kind == "flashinfer" else GatherAttention
    model = Model(config, random_weights(config, 3, torch.bfloat16, CUDA), attention)
    engine_config = EngineConfig(tiny.folder, max_num_seqs=9, max_model_len=400)
    return model, with_graphs(model, attention, engine_config, cuda_capture(CUDA))


def decode_rows(num_seqs: int, kv: KVCache) -> BatchInput:
    return build(tuple((1, 1 + 37 * index % 390) for index in range(num_seqs)), kv)


@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_replayed_steps_are_those_that_run(
    config: ModelConfig, wide_llama: TinyModel, kind: str
) -> None:
    """All batch sizes, and after larger ones. bfloat16, and padding changes how products are cut:
    logits of order 1 may differ in their last bits."""
    model, graphed = load(config, wide_llama, kind)
    kv = random_kv(config, 16)
    graphed.prepare(kv)
    for num_seqs in (9, *range(1, 10), 2):
        batch = decode_rows(num_seqs, kv)
        assert graphed.shape_of(batch, kv) is not None
        replayed = graphed.forward(batch, kv).logits.clone()
        torch.testing.assert_close(replayed, model.forward(batch, kv).logits, atol=0.1, rtol=0.05)


@pytest.mark.parametrize("tiny_model", ["llama", "qwen2", "mistral"], indirect=True)
def test_tokens_in_float32_are_exact(tiny_model: TinyModel) -> None:
    """By torch's attention, which is FlashInfer's substitute in float32."""
    config = ModelConfig.from_folder(tiny_model.folder)
    model = Model(config, random_weights(config, 3, torch.float32, CUDA))
    engine_config = EngineConfig(tiny_model.folder, max_num_seqs=9, max_model_len=128)
    graphed = with_graphs(model, GatherAttention, engine_config, cuda_capture(CUDA))
    prompts = [random_prompt(length, seed=length) for length in (1, 5, 40, 64)]
    replayed, as_it_comes = (
        ModelDriver(each, config, torch.float32, CUDA).generate(prompts, 12, chunk_seed=5)
        for each in (graphed, model)
    )
    assert replayed == as_it_comes


@contextmanager
def no_waits() -> Iterator[None]:
    """Whatever would make the host wait for the device is an error."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_replayed", [True, False], ids=["replayed", "as it comes"])
@torch.inference_mode()
def test_a_decode_step_waits_for_nothing(
    config: ModelConfig, wide_llama: TinyModel, kind: str, is_replayed: bool
) -> None:
    """From rows on the host to logits on the device."""
    model, graphed = load(config, wide_llama, kind)
    kv = random_kv(config, 16)
    graphed.prepare(kv)
    logits: list[Tensor] = []
    for turn in range(3):  # the first may set up what lasts
        waits = no_waits() if turn else contextmanager(lambda: iter([None]))()
        with waits:
            batch = decode_rows(5, kv)
            logits.append((graphed if is_replayed else model).forward(batch, kv).logits)
    assert torch.isfinite(logits[-1]).all()


@torch.inference_mode()
def test_a_step_with_prompts_waits_for_nothing(config: ModelConfig, wide_llama: TinyModel) -> None:
    model, _ = load(config, wide_llama, "torch")
    kv = random_kv(config, 16)
    model.forward(build(ROWS, kv), kv)
    with no_waits():
        model.forward(build(ROWS, kv), kv)


def test_copies_of_blocks_wait_for_nothing(config: ModelConfig) -> None:
    kv = random_kv(config, 16)
    with no_waits():
        kv.copy_blocks([(1, 7), (2, 9)])
    assert torch.equal(kv.data[:, :, 7], kv.data[:, :, 1])
    assert torch.equal(kv.data[:, :, 9], kv.data[:, :, 2])


def test_the_default_pool_leaves_room_for_a_step(
    config: ModelConfig, wide_llama: TinyModel
) -> None:
    engine_config = EngineConfig(wide_llama.folder, device="cuda", dtype="bfloat16")
    kv = open_pool(engine_config, config, torch.bfloat16, CUDA)
    free, total = torch.cuda.mem_get_info()
    assert kv.data.nbytes > total // 4, "a card that is nobody else's"
    assert free > total // 50
    assert kv.data.shape[2] == kv.num_blocks + 1


@pytest.mark.parametrize("cuda_graphs", [True, False])
@pytest.mark.parametrize("sampling", SAMPLING)
def test_an_engine_waits_once_a_step(
    wide_llama: TinyModel,
    monkeypatch: pytest.MonkeyPatch,
    cuda_graphs: bool,
    sampling: dict[str, Any],
) -> None:
    """For the tokens, which it reads by `cpu`; prompts, decodes and sampling are queued."""
    read = Tensor.cpu

    def reading(tensor: Tensor) -> Tensor:
        torch.cuda.set_sync_debug_mode("default")
        try:
            return read(tensor)
        finally:
            torch.cuda.set_sync_debug_mode("error")

    config = EngineConfig(
        wide_llama.folder,
        device="cuda",
        dtype="bfloat16",
        num_blocks=64,
        max_model_len=256,
        cuda_graphs=cuda_graphs,
    )
    engine = Engine(config, listener := Listener())
    engine.start()
    try:
        rig = Rig(engine, listener)
        first = rig.run(*requests_for(sampling))  # what is set up once may wait
        with no_waits():
            monkeypatch.setattr(Tensor, "cpu", reading)
            again = [
                replace(each, request_id=RequestId(f"{each.request_id} again"))
                for each in requests_for(sampling)
            ]
            assert len(rig.run(*again)) == len(first)
            monkeypatch.undo()
        assert engine.failure is None
    finally:
        engine.stop()
