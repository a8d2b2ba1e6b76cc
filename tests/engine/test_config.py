"""What a model folder says, and what is refused by name."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.config import ModelConfig, ModelError, RopeConfig
from engine.engine_config import EngineConfig
from engine.errors import UnsupportedModel
from tests.engine.conftest import TinyModel

# As transformers 4 wrote it for Llama 3.2 1B, shortened.
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
    "eos_token_id": [128001, 128008, 128009],
}


def read(tmp_path: Path, **changes: object) -> ModelConfig:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, **changes}))
    return ModelConfig.from_folder(tmp_path)


def test_a_folder_of_transformers_4(tmp_path: Path) -> None:
    config = read(tmp_path)
    assert config.rope == RopeConfig("llama3", 500000.0, 32.0, 1.0, 4.0, 8192)
    assert (config.head_dim, config.num_kv_heads, config.num_layers) == (64, 8, 16)
    assert config.dtype is torch.bfloat16
    assert config.eos_token_ids == {128001, 128008, 128009}
    assert config.windows == (None,) * 16
    assert not any((config.qkv_bias, config.o_bias, config.mlp_bias, config.qk_norm))


def test_generation_config_knows_better_what_ends_an_answer(tmp_path: Path) -> None:
    generation = tmp_path / "generation_config.json"
    generation.write_text('{"eos_token_id": 7}')
    assert read(tmp_path).eos_token_ids == {7}
    generation.write_text('{"temperature": 1.0}')
    assert read(tmp_path).eos_token_ids == {128001, 128008, 128009}


def test_families_of_transformers_5(tiny_model: TinyModel) -> None:
    config = ModelConfig.from_folder(tiny_model.folder)
    reference = tiny_model.reference
    assert config.architecture == type(reference).__name__
    assert config.qk_norm == (tiny_model.family == "qwen3")
    assert config.qkv_bias == (tiny_model.family in ("qwen2", "qwen3", "llama3"))
    assert config.o_bias == (tiny_model.family in ("qwen3", "llama3"))
    assert config.tie_word_embeddings == (tiny_model.family == "llama")
    windows = {"qwen2": (None, 24, 24), "mistral": (20, 20, 20)}
    assert config.windows == windows.get(tiny_model.family, (None, None, None))
    assert config.dtype is torch.float32


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["GemmaForCausalLM"]}, "GemmaForCausalLM"),
        ({"hidden_act": "gelu"}, "'gelu'"),
        ({"quantization_config": {"quant_method": "awq"}}, "awq"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "'yarn'"),
        ({"rope_scaling": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "0.5"),
        ({"torch_dtype": "float8_e4m3fn"}, "float8_e4m3fn"),
    ],
)
def test_what_we_would_compute_wrongly_is_refused_by_name(
    tmp_path: Path, changes: dict[str, object], named: str
) -> None:
    with pytest.raises(UnsupportedModel, match=named):
        read(tmp_path, **changes)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"hidden_size": None}, "hidden_size"),
        ({"num_hidden_layers": "many"}, "num_hidden_layers"),
        ({"num_key_value_heads": 5}, "5 KV heads"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor"),
        ({"eos_token_id": "</s>"}, "eos_token_id"),
    ],
)
def test_a_bad_config_says_what_is_bad(
    tmp_path: Path, changes: dict[str, object], named: str
) -> None:
    with pytest.raises(ModelError, match=named):
        read(tmp_path, **changes)


def test_no_folder_and_no_json(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="cannot be read"):
        ModelConfig.from_folder(tmp_path / "nowhere")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="cannot be read"):
        ModelConfig.from_folder(tmp_path)


def test_kv_memory_buys_whole_blocks(tmp_path: Path) -> None:
    model = read(tmp_path)
    assert model.kv_token_nbytes(torch.bfloat16) == 16 * 2 * 8 * 64 * 2
    block_nbytes = 16 * model.kv_token_nbytes(torch.bfloat16)
    config = EngineConfig(tmp_path, kv_memory=10 * block_nbytes - 1)
    assert config.resolve_num_blocks(model) == 9
    assert replace(config, num_blocks=77).resolve_num_blocks(model) == 77
    assert replace(config, dtype="float32").resolve_num_blocks(model) == 4
    with pytest.raises(ModelError, match="no room"):
        replace(config, kv_memory=block_nbytes - 1).resolve_num_blocks(model)
    with pytest.raises(ModelError, match="no room"):
        replace(config, num_blocks=0).resolve_num_blocks(model)


def test_settings_are_resolved_against_the_model(tmp_path: Path) -> None:
    model, config = read(tmp_path), EngineConfig(tmp_path, device="cpu")
    assert config.resolve_dtype(model) is torch.bfloat16
    assert replace(config, dtype="float32").resolve_dtype(model) is torch.float32
    assert config.resolve_device() == torch.device("cpu")
    assert config.resolve_max_model_len(model) == 131072
    assert replace(config, max_model_len=100).resolve_max_model_len(model) == 100
    with pytest.raises(ModelError, match="131073"):
        replace(config, max_model_len=131073).resolve_max_model_len(model)
    with pytest.raises(ModelError, match="block_size"):
        EngineConfig(tmp_path, block_size=0)


def test_a_missing_card_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ModelError, match="no CUDA device"):
        EngineConfig(tmp_path, device="cuda").resolve_device()
    assert EngineConfig(tmp_path).resolve_device().type == "cpu"


@pytest.mark.parametrize("field", ["token_budget", "tpot_slo_ms", "max_num_seqs"])
def test_limits_that_let_nothing_through_are_refused_by_name(tmp_path: Path, field: str) -> None:
    with pytest.raises(ModelError, match=f"{field} is 0"):
        EngineConfig(tmp_path, **{field: 0})  # type: ignore[arg-type]
