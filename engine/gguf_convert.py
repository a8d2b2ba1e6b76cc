"""GGUF → a Hugging Face folder: weights dequantized into safetensors, config, generation config.

One tensor is in memory at a time, plus the shard being filled. Knows the tensor names and the
metadata keys that llama.cpp's converter writes for the families of engine/config.py; a tensor it
does not recognise is refused by name rather than left out. The tokenizer is gguf_tokenizer.py's.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from engine.config import RopeConfig
from engine.errors import UnsupportedModel
from engine.gguf_file import ARCHITECTURES, GgufFile
from engine.rope import rope_inv_freq

_SHARD_NBYTES = 2 << 30
_OUTER_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROPE_FACTORS = "rope_freqs.weight"
# Control tokens that end an answer besides the one the metadata calls eos.
_END_TOKENS = frozenset({"<|endoftext|>", "<|im_end|>", "<|eot_id|>", "<|end_of_text|>"})
_CONTROL = 3  # llama.cpp's token type


def convert_weights(
    source: GgufFile, out: Path, dtype: torch.dtype, on_progress: Callable[[int, int], None]
) -> None:
    """Writes config.json, generation_config.json and *.safetensors. `on_progress` gets values
    done and in all. Raises ModelError."""
    shapes = source.tensor_shapes()
    names = {name: _hf_name(name, shapes) for name in shapes if name != _ROPE_FACTORS}
    config = _config(source, shapes, dtype)
    _write_json(out / "config.json", config)
    _write_json(out / "generation_config.json", _generation_config(source))
    total = sum(torch.Size(shape).numel() for shape in shapes.values())
    done = 0
    shards = _Shards(out)
    for name, tensor in source.tensors():
        if name in names:
            shards.add(names[name], _unpermute(source, name, tensor).to(dtype).contiguous())
        done += tensor.numel()
        on_progress(done, total)
    shards.finish()


def _hf_name(name: str, known: dict[str, tuple[int, ...]]) -> str:
    """blk.3.attn_q.weight → model.layers.3.self_attn.q_proj.weight"""
    stem, _, kind = name.rpartition(".")
    if stem in _OUTER_NAMES:
        return f"{_OUTER_NAMES[stem]}.{kind}"
    match stem.split("."):
        case ["blk", layer, part] if part in _LAYER_NAMES and kind in ("weight", "bias"):
            return f"model.layers.{layer}.{_LAYER_NAMES[part]}.{kind}"
    raise UnsupportedModel(f"GGUF tensor {name} (of {len(known)}) belongs to no supported model")


def _unpermute(source: GgufFile, name: str, tensor: Tensor) -> Tensor:
    """llama.cpp interleaves the rotary pairs of llama's q and k rows; here the halves of a head
    are apart."""
    if source.family != "llama" or not name.endswith(("attn_q.weight", "attn_k.weight")):
        return tensor
    heads = source.integer("attention.head_count")
    if name.endswith("attn_k.weight"):
        heads = source.integer("attention.head_count_kv", heads)
    pairs = tensor.view(heads, -1, 2, tensor.shape[-1])  # [heads, head_dim / 2, 2, in]
    return pairs.transpose(1, 2).reshape(tensor.shape)


def _config(
    source: GgufFile, shapes: dict[str, tuple[int, ...]], dtype: torch.dtype
) -> dict[str, object]:
    heads, hidden = source.integer("attention.head_count"), source.integer("embedding_length")
    head_dim = source.integer("attention.key_length", hidden // heads)
    if source.integer("rope.dimension_count", head_dim) != head_dim:
        raise UnsupportedModel("partial rotary embedding")
    vocab_size, _ = shapes["token_embd.weight"]
    return {
        "architectures": [ARCHITECTURES[source.family]],
        "model_type": source.family,
        "vocab_size": vocab_size,
        "hidden_size": hidden,
        "intermediate_size": source.integer("feed_forward_length"),
        "num_hidden_layers": source.integer("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": source.integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": source.integer("context_length"),
        # float32 in the file: 9.999999747378752e-06 was 1e-05
        "rms_norm_eps": float(f"{source.number('attention.layer_norm_rms_epsilon', 1e-6):.6g}"),
        "rope_parameters": _rope(source, head_dim),
        "tie_word_embeddings": "output.weight" not in shapes,
        "dtype": str(dtype).removeprefix("torch."),
        **_special_ids(source),
    }


def _rope(source: GgufFile, head_dim: int) -> dict[str, object]:
    theta = source.number("rope.freq_base", 10_000.0)
    kind = str(source.get(f"{source.family}.rope.scaling.type", "none"))
    factors = [tensor for name, tensor in source.tensors() if name == _ROPE_FACTORS]
    if factors:
        return _llama3_rope(theta, head_dim, factors[0])
    if kind == "none":
        return {"rope_type": "default", "rope_theta": theta}
    if kind == "linear":
        factor = source.number("rope.scaling.factor", 1.0)
        return {"rope_type": "linear", "rope_theta": theta, "factor": factor}
    raise UnsupportedModel(f"rope scaling {kind!r}; supported are none, linear, llama3")


def _llama3_rope(theta: float, head_dim: int, factors: Tensor) -> dict[str, object]:
    """The file holds what each frequency is divided by, not the four numbers behind it; Llama 3.1
    to 3.3 differ in the factor alone."""
    scaled = RopeConfig("llama3", theta, float(factors.max()))
    plain = rope_inv_freq(RopeConfig("default", theta), head_dim)
    if not torch.allclose(plain / rope_inv_freq(scaled, head_dim), factors, rtol=1e-3):
        raise UnsupportedModel(f"rope factors ({_ROPE_FACTORS}) that are not those of Llama 3")
    return {
        "rope_type": "llama3",
        "rope_theta": theta,
        "factor": scaled.factor,
        "low_freq_factor": scaled.low_freq_factor,
        "high_freq_factor": scaled.high_freq_factor,
        "original_max_position_embeddings": scaled.original_max_position,
    }


def _special_ids(source: GgufFile) -> dict[str, object]:
    return {
        "bos_token_id": source.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": source.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": source.get("tokenizer.ggml.padding_token_id"),
    }


def _generation_config(source: GgufFile) -> dict[str, object]:
    """Every token that ends an answer, the metadata's own eos first."""
    tokens, kinds = source.get("tokenizer.ggml.tokens"), source.get("tokenizer.ggml.token_type")
    assert isinstance(tokens, list)
    assert isinstance(kinds, list)
    ends = [source.get("tokenizer.ggml.eos_token_id"), source.get("tokenizer.ggml.eot_token_id")]
    ends += [
        token_id
        for token_id, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
        if kind == _CONTROL and token in _END_TOKENS
    ]
    unique = [token_id for token_id in dict.fromkeys(ends) if token_id is not None]
    return {**_special_ids(source), "eos_token_id": unique}


class _Shards:
    """Safetensors files of bounded size, with their index where there are several."""

    def __init__(self, out: Path) -> None:
        self._out = out
        self._pending: dict[str, Tensor] = {}
        self._pending_nbytes = 0
        self._file_of: dict[str, str] = {}
        self._num_files = 0

    def add(self, name: str, tensor: Tensor) -> None:
        if self._pending and self._pending_nbytes + tensor.nbytes > _SHARD_NBYTES:
            self._num_files += 1
            self._write(f"model-{self._num_files:05d}.safetensors")
        self._pending[name] = tensor
        self._pending_nbytes += tensor.nbytes

    def finish(self) -> None:
        if self._num_files == 0:
            self._write("model.safetensors")
            return
        self._write(f"model-{self._num_files + 1:05d}.safetensors")
        index = {"metadata": {}, "weight_map": self._file_of}
        _write_json(self._out / "model.safetensors.index.json", index)

    def _write(self, file_name: str) -> None:
        save_file(self._pending, self._out / file_name, metadata={"format": "pt"})
        self._file_of.update(dict.fromkeys(self._pending, file_name))
        self._pending, self._pending_nbytes = {}, 0


def _write_json(path: Path, value: Mapping[str, object]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
