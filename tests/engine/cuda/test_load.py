"""FlashInfer is found, tried, and given up for a reason before the first request."""

import logging
from dataclasses import replace
from types import ModuleType

import numpy as np
import pytest
import torch

from engine.attention import GatherAttention
from engine.batch import BatchInput, BatchRow
from engine.config import ModelConfig, ModelError
from engine.cuda.capture import Work, repeat
from engine.cuda.flashinfer_attention import FlashInfer
from engine.cuda.flashinfer_library import unsupported
from engine.cuda.load import open_flashinfer, with_graphs
from engine.cuda.shapes import Shape
from engine.decoder import Kernels, choose_kernels, load_decoder
from engine.engine_config import EngineConfig
from engine.kv_cache import KVCache
from engine.model import Model
from engine.weights import ModelWeights, read_weights
from tests.engine.conftest import TinyModel
from tests.engine.cuda.fake_flashinfer import FakeFlashInfer

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def model(wide_llama: TinyModel) -> ModelConfig:
    """Heads of 64."""
    return ModelConfig.from_folder(wide_llama.folder)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> FakeFlashInfer:
    """It is installed."""
    fake = FakeFlashInfer()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: ModuleType(name))
    monkeypatch.setattr("engine.cuda.load.load", lambda: fake)
    return fake


def choose(
    tiny: TinyModel, model: ModelConfig, kernels: str = "auto", dtype: torch.dtype = torch.bfloat16
) -> tuple[Kernels, str]:
    config = EngineConfig(tiny.folder, kernels=kernels)  # type: ignore[arg-type]
    return choose_kernels(config, model, dtype, CUDA)


@pytest.mark.usefixtures("library")
def test_it_is_taken_where_it_knows_the_model(wide_llama: TinyModel, model: ModelConfig) -> None:
    assert choose(wide_llama, model) == ("flashinfer", "")
    assert choose(wide_llama, model, "torch") == ("torch", "")
    odd, why = replace(model, head_dim=96), "head_dim is 96; FlashInfer's are 64, 128 and 256"
    assert choose(wide_llama, odd) == ("torch", why)
    exact = choose(wide_llama, model, dtype=torch.float32)
    assert exact == ("torch", "FlashInfer knows no torch.float32")


@pytest.mark.usefixtures("library")
def test_what_was_asked_for_is_not_replaced(wide_llama: TinyModel, model: ModelConfig) -> None:
    with pytest.raises(ModelError, match=r"FlashInfer's, but FlashInfer knows no torch\.float32"):
        choose(wide_llama, model, "flashinfer", torch.float32)
    with pytest.raises(ModelError, match="Numba's, but the device is cuda"):
        choose(wide_llama, model, "numba")
    config = EngineConfig(wide_llama.folder, kernels="flashinfer")
    with pytest.raises(ModelError, match="FlashInfer's, but the device is cpu"):
        choose_kernels(config, model, torch.bfloat16, CPU)


def test_without_the_package(monkeypatch: pytest.MonkeyPatch, model: ModelConfig) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert unsupported(model, torch.bfloat16) == "FlashInfer is not installed"


@pytest.mark.parametrize("windows", [(None, None), (24, None), (24, 24)])
def test_it_is_tried_before_the_first_request(
    library: FakeFlashInfer, model: ModelConfig, windows: tuple[int | None, ...]
) -> None:
    for block_size in (1, 16):
        library.num_plans = 0
        tried = replace(model, windows=windows)
        opened = open_flashinfer(tried, torch.bfloat16, CPU, block_size)
        assert isinstance(opened, FlashInfer)
        assert library.num_plans == 2 * len(set(windows)), "both kinds of rows, all windows"


def test_one_that_fails_is_given_up(
    wide_llama: TinyModel,
    model: ModelConfig,
    library: FakeFlashInfer,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The reason is one line; whoever asked for it gets an error."""

    def break_down(*_: object, **__: object) -> None:
        raise RuntimeError("Could not find nvcc\nand much more")

    monkeypatch.setattr(library, "BatchDecodeWithPagedKVCacheWrapper", break_down)
    # There is no card here: the choice is made as if there were one.
    monkeypatch.setattr("engine.decoder.choose_kernels", lambda *_: ("flashinfer", ""))
    with caplog.at_level(logging.INFO, "engine.decoder"):
        config = EngineConfig(wide_llama.folder, device="cpu")
        decoder = load_decoder(config, model, torch.bfloat16, CPU)
    decoder.close()
    assert decoder._attention is GatherAttention  # type: ignore[attr-defined]
    assert "the model runs by torch (FlashInfer fails: Could not find nvcc)" in caplog.text
    with pytest.raises(ModelError, match=r"FlashInfer fails: Could not find nvcc$"):
        load_decoder(replace(config, kernels="flashinfer"), model, torch.bfloat16, CPU)


def test_an_assertion_is_the_library_s_reason_or_our_bug(
    model: ModelConfig, library: FakeFlashInfer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def insist(*_: object, **__: object) -> None:
        raise AssertionError("pages must be even")

    with monkeypatch.context() as patched:
        patched.setattr(library, "BatchDecodeWithPagedKVCacheWrapper", insist)
        with pytest.raises(ModelError, match="FlashInfer fails: pages must be even"):
            open_flashinfer(model, torch.bfloat16, CPU, 16)
    # A batch without rows is what `PackedBatch` never builds.
    monkeypatch.setattr("engine.cuda.load._ROWS", ())
    with pytest.raises(AssertionError, match="a step computes something"):
        open_flashinfer(model, torch.bfloat16, CPU, 16)


@pytest.mark.parametrize("kernels", ["torch", "flashinfer"])
def test_an_engine_that_replays(
    wide_llama: TinyModel, model: ModelConfig, library: FakeFlashInfer, kernels: str
) -> None:
    """As a card has it: shapes from the configuration, and attention's graphs by its kind."""
    config = EngineConfig(wide_llama.folder, max_num_seqs=9, token_budget=5, max_model_len=90)
    weights = read_weights(wide_llama.folder, model, torch.float32, CPU, ModelWeights.read)
    attention = FlashInfer(library, CPU) if kernels == "flashinfer" else GatherAttention
    plain = Model(model, weights, attention)
    graphed = with_graphs(plain, attention, config, repeat)
    kv = KVCache(model, 4, 16, torch.float32, CPU, has_scratch=True)
    graphed.prepare(kv)
    assert sorted(graphed._replays) == [Shape(n, 4) for n in (1, 2, 4, 5)]
    row = BatchRow(np.zeros(1, dtype=np.int64), 20, np.array([2, 1]), wants_logits=True)
    batch = BatchInput.build([row, row, row], 16, CPU)
    logits = graphed.forward(batch, kv).logits
    torch.testing.assert_close(logits, plain.forward(batch, kv).logits, atol=1e-5, rtol=1e-5)
    graphed.close()


def test_no_memory_to_capture_is_one_clear_error(wide_llama: TinyModel, model: ModelConfig) -> None:
    def no_memory(work: Work) -> Work:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    weights = read_weights(wide_llama.folder, model, torch.float32, CPU, ModelWeights.read)
    config = EngineConfig(wide_llama.folder)
    graphed = with_graphs(Model(model, weights), GatherAttention, config, no_memory)
    with pytest.raises(ModelError, match=r"to capture steps of 64 sequences: .*--kv-memory"):
        graphed.prepare(KVCache(model, 4, 16, torch.float32, CPU, has_scratch=True))
