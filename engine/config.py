"""What a model is: `ModelConfig`, frozen.

`ModelConfig.from_folder` reads a Hugging Face folder's config.json and generation_config.json, as
written by transformers 4 or 5, and refuses by name whatever engine/model.py would compute wrongly.
It reads no weights.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from engine.errors import EngineError, UnsupportedModel

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


class ModelError(EngineError, ValueError):
    """A model folder, or the settings it is to run with, cannot be used; the text says why."""


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding; the scaling fields are read only by the kinds that name them."""

    kind: Literal["default", "linear", "llama3"]
    theta: float
    factor: float = 1.0
    """linear, llama3: positions are stretched by this much."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One decoder-only transformer. Everything engine/model.py branches on is a field here."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RopeConfig
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    """RMS norm over each head of q and k, before the rotary embedding (Qwen3)."""
    tie_word_embeddings: bool
    windows: tuple[int | None, ...]
    """Per layer: a token sees the last so many tokens, itself included; None sees all."""
    dtype: torch.dtype
    """What the weights are stored in."""
    eos_token_ids: frozenset[int]

    @classmethod
    def from_folder(cls, folder: Path) -> "ModelConfig":
        """Raises ModelError if the folder holds no readable config, UnsupportedModel by name."""
        raw = _read_json(folder / "config.json")
        generation = folder / "generation_config.json"
        end_ids = _read_json(generation).get("eos_token_id") if generation.exists() else None
        try:
            return _parse(raw, raw.get("eos_token_id") if end_ids is None else end_ids)
        except EngineError:
            raise
        except (KeyError, TypeError, ValueError) as error:
            raise ModelError(f"{folder}/config.json is not usable: {error!r}") from error

    def kv_shape(self, dtype: torch.dtype) -> tuple[int, int, int]:
        """(layers, KV heads, bytes of one head of one token's K or V)."""
        return self.num_layers, self.num_kv_heads, self.head_dim * dtype.itemsize

    def kv_token_nbytes(self, dtype: torch.dtype) -> int:
        """K and V of one token over all layers."""
        layers, heads, head_nbytes = self.kv_shape(dtype)
        return layers * 2 * heads * head_nbytes


def _read_json(path: Path) -> Mapping[str, object]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} does not hold a JSON object")
    return value


def _parse(raw: Mapping[str, object], end_ids: object) -> ModelConfig:
    """Defaults for absent keys are those of the architecture's configuration in transformers."""
    architecture = _architecture(raw)
    _refuse(raw, "hidden_act", "silu", "activation")
    _refuse(raw, "quantization_config", None, "quantization")
    num_layers = _integer(raw, "num_hidden_layers")
    num_heads = _integer(raw, "num_attention_heads")
    hidden_size = _integer(raw, "hidden_size")
    num_kv_heads = _integer(raw, "num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise ModelError(f"{num_heads} heads do not share {num_kv_heads} KV heads evenly")
    is_qwen2, is_qwen3 = architecture.startswith("Qwen2"), architecture.startswith("Qwen3")
    has_bias = bool(raw.get("attention_bias", False))
    is_llama = architecture.startswith("Llama")
    return ModelConfig(
        architecture=architecture,
        vocab_size=_integer(raw, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_integer(raw, "intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=_integer(raw, "head_dim", 128 if is_qwen3 else hidden_size // num_heads),
        max_position_embeddings=_integer(raw, "max_position_embeddings"),
        rms_norm_eps=_number(raw, "rms_norm_eps", 1e-6),
        rope=_rope(raw),
        qkv_bias=is_qwen2 or (has_bias and (is_llama or is_qwen3)),
        o_bias=has_bias and (is_llama or is_qwen3),
        mlp_bias=is_llama and bool(raw.get("mlp_bias", False)),
        qk_norm=is_qwen3,
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        windows=_windows(raw, architecture, num_layers),
        dtype=_stored_dtype(raw),
        eos_token_ids=_token_ids(end_ids),
    )


def _architecture(raw: Mapping[str, object]) -> str:
    names = raw.get("architectures")
    name = str(names[0]) if isinstance(names, list) and names else str(raw.get("model_type"))
    if name not in _ARCHITECTURES:
        raise UnsupportedModel(f"architecture {name}; supported are {', '.join(_ARCHITECTURES)}")
    return name


def _refuse(raw: Mapping[str, object], key: str, supported: object, what: str) -> None:
    if raw.get(key, supported) not in (supported, None):
        raise UnsupportedModel(f"{what} {raw[key]!r}; supported is {supported}")


def _integer(raw: Mapping[str, object], key: str, default: int | None = None) -> int:
    value = raw.get(key)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelError(f"config.json: {key} is {value!r}, not a positive integer")
    return value


def _number(raw: Mapping[str, object], key: str, default: float) -> float:
    value = raw.get(key)
    value = default if value is None else value
    if not isinstance(value, int | float):
        raise ModelError(f"config.json: {key} is {value!r}, not a number")
    return float(value)


def _rope(raw: Mapping[str, object]) -> RopeConfig:
    """transformers 5 writes `rope_parameters`; 4 wrote `rope_theta` beside `rope_scaling`."""
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise ModelError(f"config.json: the rope parameters are {rope!r}")
    _refuse(rope, "partial_rotary_factor", 1.0, "partial rotary embedding of")
    kind = rope.get("rope_type", rope.get("type", "default"))
    theta = _number(rope, "rope_theta", _number(raw, "rope_theta", 10_000.0))
    if kind == "default":
        return RopeConfig("default", theta)
    if kind == "linear":
        return RopeConfig("linear", theta, float(rope["factor"]))
    if kind == "llama3":
        original = _integer(raw, "max_position_embeddings")
        return RopeConfig(
            "llama3",
            theta,
            float(rope["factor"]),
            float(rope["low_freq_factor"]),
            float(rope["high_freq_factor"]),
            _integer(rope, "original_max_position_embeddings", original),
        )
    raise UnsupportedModel(f"rope scaling {kind!r}; supported are default, linear, llama3")


def _windows(
    raw: Mapping[str, object], architecture: str, num_layers: int
) -> tuple[int | None, ...]:
    if architecture.startswith("Llama"):
        return (None,) * num_layers
    if raw.get("sliding_window", 4096) is None:
        return (None,) * num_layers
    window = _integer(raw, "sliding_window", 4096)
    if architecture.startswith("Mistral"):
        return (window,) * num_layers
    if not raw.get("use_sliding_window", False):
        return (None,) * num_layers
    kinds = raw.get("layer_types")
    if isinstance(kinds, list) and len(kinds) == num_layers:
        return tuple(window if kind == "sliding_attention" else None for kind in kinds)
    first = int(_number(raw, "max_window_layers", 28))
    return tuple(window if layer >= first else None for layer in range(num_layers))


def _stored_dtype(raw: Mapping[str, object]) -> torch.dtype:
    name = str(raw.get("dtype") or raw.get("torch_dtype") or "float32")
    if name not in DTYPES:
        raise UnsupportedModel(f"weights of dtype {name}; supported are {', '.join(DTYPES)}")
    return DTYPES[name]


def _token_ids(value: object) -> frozenset[int]:
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(token_id, int) for token_id in ids):
        raise ModelError(f"eos_token_id is {value!r}, not token ids")
    return frozenset(ids)
