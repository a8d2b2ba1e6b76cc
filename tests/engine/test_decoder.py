"""Which implementation of the model a machine gets."""

from pathlib import Path

import pytest
import torch

from engine.config import ModelConfig, ModelError
from engine.decoder import Kernels, choose_kernels, compile_kernels, load_decoder
from engine.engine_config import EngineConfig
from engine.model import Model
from tests.engine.conftest import TinyModel

CPU = torch.device("cpu")


def choose(tiny: TinyModel, device: str = "cpu", **fields: str) -> tuple[str, str]:
    model = ModelConfig.from_folder(tiny.folder)
    config = EngineConfig(Path(tiny.folder), **fields)  # type: ignore[arg-type]
    return choose_kernels(config, model, torch.float32, torch.device(device))


@pytest.fixture
def no_numba(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)


def test_numba_where_it_knows_the_model(wide_llama: TinyModel) -> None:
    pytest.importorskip("numba")
    assert choose(wide_llama) == ("numba", "")
    assert choose(wide_llama, kernels="torch") == ("torch", "")


def test_torch_elsewhere_and_why(tiny_llama: TinyModel, wide_llama: TinyModel) -> None:
    pytest.importorskip("numba")
    assert choose(tiny_llama) == ("torch", "head_dim is 8, not a multiple of 32")
    assert choose(wide_llama, "cuda") == ("torch", "FlashInfer is not installed")
    with pytest.raises(ModelError, match="Numba's, but head_dim is 8"):
        choose(tiny_llama, kernels="numba")


@pytest.mark.usefixtures("no_numba")
def test_torch_without_numba(wide_llama: TinyModel) -> None:
    assert choose(wide_llama) == ("torch", "Numba is not installed")
    config = EngineConfig(wide_llama.folder, device="cpu", dtype="float32")
    model_config = ModelConfig.from_folder(wide_llama.folder)
    model = load_decoder(config, model_config, torch.float32, CPU)
    assert isinstance(model, Model)
    compile_kernels(model_config)  # nothing to do, nothing breaks


def test_both_have_one_digest(wide_llama: TinyModel) -> None:
    """A worker on Numba's kernels and one on torch's may hand KV over."""
    pytest.importorskip("numba")
    model_config = ModelConfig.from_folder(wide_llama.folder)
    digests = set()
    both: tuple[Kernels, ...] = ("numba", "torch")
    for kernels in both:
        config = EngineConfig(wide_llama.folder, kernels=kernels, num_threads=1)
        model = load_decoder(config, model_config, torch.float32, CPU)
        digests.add(model.digest)
        model.close()
    assert len(digests) == 1
