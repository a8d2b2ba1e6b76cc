"""FlashInfer is found, tried, and given up for a reason before the first request."""

import logging
from dataclasses import replace
from types import ModuleType

import pytest
import torch

from engine.attention import GatherAttention
from engine.config import ModelConfig, ModelError
from engine.cuda.flashinfer_attention import FlashInfer
from engine.cuda.flashinfer_library import unsupported
from engine.cuda.load import open_flashinfer
from engine.decoder import Kernels, choose_kernels, load_decoder
from engine.engine_config import EngineConfig
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
