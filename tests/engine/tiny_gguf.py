"""Writes tiny models as GGUF files, the way llama.cpp's converter does, and their wheel."""

import zipfile
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from engine.config import ModelConfig

CONTROL, NORMAL = 3, 1
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MERGES = ("Ġ Ġ", "Ċ Ċ", "o n", "on e")
CHAT_TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def vocabulary() -> list[str]:
    """Control tokens, every printable ASCII letter, space, newline and what merges make."""
    letters = [chr(code) for code in range(33, 127)]
    return [*SPECIAL_TOKENS, *letters, "Ġ", "Ċ", *(merge.replace(" ", "") for merge in MERGES)]


class TinyGguf:
    """Tests change `writer` or `tensors` before `write`."""

    def __init__(
        self,
        path: Path,
        family: str,
        folder: Path,
        rule: str = "smollm",
        rope_theta: float = 10_000.0,
    ) -> None:
        self.path = path
        self.config = ModelConfig.from_folder(folder)
        self.writer: Any = gguf.GGUFWriter(path, family)
        self.tensors = self._tensors(family, load_file(folder / "model.safetensors"))
        self._add_shape(rope_theta)
        self._add_tokenizer(rule)

    def write(self) -> Path:
        for name, tensor in self.tensors.items():
            self.writer.add_tensor(name, tensor.float().contiguous().numpy())
        self.writer.write_header_to_file()
        self.writer.write_kv_data_to_file()
        self.writer.write_tensors_to_file()
        self.writer.close()
        return self.path

    def _tensors(self, family: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        renamed = {}
        for name, tensor in tensors.items():
            stem, _, kind = name.rpartition(".")
            if stem not in _NAMES:
                _, _, layer, part = stem.split(".", 3)
                at, part = f"blk.{layer}.", _NAMES[part]
            else:
                at, part = "", _NAMES[stem]
            if family == "llama" and part in ("attn_q", "attn_k"):
                tensor = self._interleaved(tensor, part)
            renamed[f"{at}{part}.{kind}"] = tensor
        return renamed

    def _interleaved(self, weight: Tensor, part: str) -> Tensor:
        heads = self.config.num_heads if part == "attn_q" else self.config.num_kv_heads
        return weight.view(heads, 2, -1, weight.shape[-1]).transpose(1, 2).reshape(weight.shape)

    def _add_shape(self, rope_theta: float) -> None:
        config, writer = self.config, self.writer
        writer.add_context_length(config.max_position_embeddings)
        writer.add_embedding_length(config.hidden_size)
        writer.add_block_count(config.num_layers)
        writer.add_feed_forward_length(config.intermediate_size)
        writer.add_head_count(config.num_heads)
        writer.add_head_count_kv(config.num_kv_heads)
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        writer.add_rope_freq_base(rope_theta)

    def _add_tokenizer(self, rule: str) -> None:
        writer, tokens = self.writer, vocabulary()
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(rule)
        writer.add_token_list(tokens)
        writer.add_token_types([CONTROL if t in SPECIAL_TOKENS else NORMAL for t in tokens])
        writer.add_token_merges(list(MERGES))
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_unk_token_id(0)
        writer.add_pad_token_id(2)
        writer.add_add_bos_token(False)
        writer.add_chat_template(CHAT_TEMPLATE)


def llama3_factors(head_dim: int, rope_theta: float) -> Tensor:
    """What llama.cpp stores for factor 8: high frequencies kept, low ones divided by 8."""
    inv_freq = rope_theta ** -(np.arange(0, head_dim, 2) / head_dim)
    turns = 8192 * inv_freq / (2 * np.pi)
    kept = np.clip((turns - 1.0) / 3.0, 0, 1)
    return torch.from_numpy(1 / (kept + (1 - kept) / 8)).float()


def write_wheel(folder: Path, package: str, version: str, payload: Path) -> None:
    """A wheel that pip accepts and that holds one file."""
    name = package.replace("-", "_")
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        wheel.write(payload, f"{name}/{payload.name}")
        metadata = f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n"
        wheel.writestr(f"{info}/METADATA", metadata)
        tag = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        wheel.writestr(f"{info}/WHEEL", tag)
        wheel.writestr(f"{info}/RECORD", "")
