"""Weights from folders that are whole, sharded, incomplete or odd; and drawn ones."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.config import ModelConfig, ModelError
from engine.weights import ModelWeights, load_weights, random_weights
from tests.engine.conftest import TinyModel

CPU = torch.device("cpu")


def load(folder: Path, config: ModelConfig, dtype: torch.dtype = torch.float32) -> ModelWeights:
    return load_weights(folder, config, dtype, CPU)


@pytest.fixture
def config(tiny_llama: TinyModel) -> ModelConfig:
    return ModelConfig.from_folder(tiny_llama.folder)


@pytest.fixture
def tensors(tiny_llama: TinyModel) -> dict[str, Tensor]:
    return load_file(tiny_llama.folder / "model.safetensors")


def test_fused_matrices_compute_their_parts(
    config: ModelConfig, tensors: dict[str, Tensor], tiny_llama: TinyModel
) -> None:
    layer = load(tiny_llama.folder, config).layers[1]
    x = torch.randn(3, config.hidden_size)
    for fused, names in (
        (layer.qkv, ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
        (layer.gate_up, ("mlp.gate_proj", "mlp.up_proj")),
    ):
        parts = [x @ tensors[f"model.layers.1.{name}.weight"].T for name in names]
        torch.testing.assert_close(fused(x), torch.cat(parts, dim=1))


def test_the_digest_follows_the_weights_and_not_the_folder(
    config: ModelConfig, tensors: dict[str, Tensor], tiny_llama: TinyModel, tmp_path: Path
) -> None:
    digest = load(tiny_llama.folder, config).digest
    names = sorted(tensors)
    weight_map = {name: f"part-{index % 2}.safetensors" for index, name in enumerate(names)}
    for file in set(weight_map.values()):
        part = {name: tensors[name] for name in names if weight_map[name] == file}
        save_file(part, tmp_path / file)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    assert load(tmp_path, config).digest == digest
    assert load(tmp_path, config, torch.bfloat16).digest != digest

    tensors["model.layers.2.mlp.down_proj.weight"] += 1e-3
    changed = tmp_path / "changed"
    changed.mkdir()
    save_file(tensors, changed / "model.safetensors")
    assert load(changed, config).digest != digest


def drop(tensors: dict[str, Tensor]) -> None:
    del tensors["model.norm.weight"]


def reshape(tensors: dict[str, Tensor]) -> None:
    tensors["model.norm.weight"] = torch.ones(47)


def add(tensors: dict[str, Tensor]) -> None:
    tensors["model.layers.0.self_attn.sinks"] = torch.ones(6)


@pytest.mark.parametrize(
    ("spoil", "named"), [(drop, "model.norm.weight"), (reshape, "47"), (add, "sinks")]
)
def test_tensors_must_be_those_of_the_config(
    config: ModelConfig,
    tensors: dict[str, Tensor],
    tmp_path: Path,
    spoil: Callable[[dict[str, Tensor]], None],
    named: str,
) -> None:
    spoil(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=named):
        load(tmp_path, config)


def test_a_stored_head_is_ignored_where_it_is_tied(
    config: ModelConfig, tensors: dict[str, Tensor], tmp_path: Path
) -> None:
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / "model.safetensors")
    load(tmp_path, config)


def test_unreadable_files_are_named(config: ModelConfig, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no \*\.safetensors"):
        load(tmp_path, config)
    (tmp_path / "model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0notjson!")
    with pytest.raises(ModelError, match=r"model\.safetensors cannot be read"):
        load(tmp_path, config)
    (tmp_path / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(ModelError, match="index"):
        load(tmp_path, config)


def test_drawn_weights_follow_the_seed(config: ModelConfig) -> None:
    weights = random_weights(config, 5, torch.float32, CPU)
    again = random_weights(config, 5, torch.float32, CPU)
    other = random_weights(config, 6, torch.float32, CPU)
    assert torch.equal(weights.embedding, again.embedding)
    assert weights.digest == again.digest != other.digest
