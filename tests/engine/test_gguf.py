"""GGUF → Hugging Face folder: weights, configuration and tokenizer, against the original."""

import json
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from engine import gguf_convert
from engine.config import ModelConfig, ModelError, RopeConfig
from engine.errors import UnsupportedModel
from engine.gguf_convert import convert_weights
from engine.gguf_file import GgufFile
from engine.gguf_tokenizer import convert_tokenizer
from engine.weights import load_weights
from tests.engine.conftest import TinyModel
from tests.engine.tiny_gguf import TinyGguf, llama3_factors

CPU = torch.device("cpu")


def convert(tiny: TinyGguf, out: Path, dtype: torch.dtype = torch.float32) -> Path:
    out.mkdir()
    seen: list[tuple[int, int]] = []
    source = GgufFile(tiny.write())
    convert_weights(source, out, dtype, lambda done, total: seen.append((done, total)))
    assert seen[-1][0] == seen[-1][1] > 0
    return out


def digest(folder: Path) -> bytes:
    config = ModelConfig.from_folder(folder)
    return load_weights(folder, config, torch.float32, CPU).digest


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_weights_come_back_as_they_were(
    tiny_models: Callable[[str], TinyModel], tmp_path: Path, family: str
) -> None:
    """Names, biases, the rotary order of q and k: the digest covers all of it."""
    original = tiny_models(family).folder
    folder = convert(TinyGguf(tmp_path / "t.gguf", family, original), tmp_path / "out")
    assert digest(folder) == digest(original)
    ours, theirs = ModelConfig.from_folder(folder), ModelConfig.from_folder(original)
    assert (ours.rope, ours.rms_norm_eps) == (theirs.rope, theirs.rms_norm_eps)
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings


def test_large_models_are_sharded(
    tiny_llama: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf_convert, "_SHARD_NBYTES", 40_000)
    folder = convert(TinyGguf(tmp_path / "t.gguf", "llama", tiny_llama.folder), tmp_path / "out")
    assert len(list(folder.glob("*.safetensors"))) > 3
    assert digest(folder) == digest(tiny_llama.folder)


def test_llama3_scaling_is_recovered_from_its_factors(
    tiny_llama: TinyModel, tmp_path: Path
) -> None:
    tiny = TinyGguf(tmp_path / "t.gguf", "llama", tiny_llama.folder, rope_theta=500_000.0)
    tiny.tensors["rope_freqs.weight"] = llama3_factors(tiny.config.head_dim, 500_000.0)
    config = ModelConfig.from_folder(convert(tiny, tmp_path / "out"))
    assert config.rope == RopeConfig("llama3", 500_000.0, 8.0, 1.0, 4.0, 8192)

    odd = TinyGguf(tmp_path / "odd.gguf", "llama", tiny_llama.folder)
    odd.tensors["rope_freqs.weight"] = torch.linspace(1, 5, odd.config.head_dim // 2)
    with pytest.raises(UnsupportedModel, match="rope factors"):
        convert(odd, tmp_path / "odd")


def test_end_tokens_and_special_ids(tiny_llama: TinyModel, tmp_path: Path) -> None:
    folder = convert(TinyGguf(tmp_path / "t.gguf", "llama", tiny_llama.folder), tmp_path / "out")
    generation = json.loads((folder / "generation_config.json").read_text())
    assert generation == {"bos_token_id": 1, "eos_token_id": [2, 0], "pad_token_id": 2}
    assert ModelConfig.from_folder(folder).eos_token_ids == {2, 0}


def test_the_tokenizer_cuts_as_the_file_says(tiny_llama: TinyModel, tmp_path: Path) -> None:
    source = GgufFile(TinyGguf(tmp_path / "t.gguf", "llama", tiny_llama.folder).write())
    convert_tokenizer(source, tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    pieces = tokenizer.convert_ids_to_tokens(tokenizer("a  2\n\n1one<|im_end|>").input_ids)
    assert pieces == ["a", "ĠĠ", "2", "ĊĊ", "1", "one", "<|im_end|>"]
    assert tokenizer.model_max_length == 512
    assert tokenizer.apply_chat_template([{"content": "hi"}], tokenize=False) == "hi"


@pytest.mark.parametrize(("rule", "pieces"), [("qwen2", ["1", "2"]), ("llama-bpe", ["1", "2"])])
def test_other_rules_are_known(
    tiny_llama: TinyModel, tmp_path: Path, rule: str, pieces: list[str]
) -> None:
    path = TinyGguf(tmp_path / "t.gguf", "llama", tiny_llama.folder, rule).write()
    convert_tokenizer(GgufFile(path), tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.convert_ids_to_tokens(tokenizer("12").input_ids) == pieces


def test_what_we_would_convert_wrongly_is_refused_by_name(
    tiny_llama: TinyModel, tmp_path: Path
) -> None:
    folder = tiny_llama.folder
    with pytest.raises(UnsupportedModel, match="gemma"):
        GgufFile(TinyGguf(tmp_path / "a.gguf", "gemma", folder).write())
    source = GgufFile(TinyGguf(tmp_path / "b.gguf", "llama", folder, "deepseek-llm").write())
    with pytest.raises(UnsupportedModel, match="deepseek-llm"):
        convert_tokenizer(source, tmp_path)
    odd = TinyGguf(tmp_path / "c.gguf", "llama", folder)
    odd.tensors["blk.0.ffn_gate_exps.weight"] = torch.ones(2, 2)
    with pytest.raises(UnsupportedModel, match="ffn_gate_exps"):
        convert(odd, tmp_path / "c")


def test_a_truncated_file_is_said(tiny_llama: TinyModel, tmp_path: Path) -> None:
    path = TinyGguf(tmp_path / "t.gguf", "llama", tiny_llama.folder).write()
    whole = path.read_bytes()
    for size in (0, 3, 100, len(whole) // 2):
        path.write_bytes(whole[:size])
        with pytest.raises(ModelError, match="not a readable GGUF"):
            list(GgufFile(path).tensors())


def test_quantized_blocks_are_dequantized(tiny_llama: TinyModel, tmp_path: Path) -> None:
    tiny = TinyGguf(tmp_path / "t.gguf", "llama", tiny_llama.folder)
    values = torch.randn(199, 64)
    packed = gguf.quants.quantize(values.numpy(), gguf.GGMLQuantizationType.Q8_0)
    tiny.writer.add_tensor("token_embd.weight", packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    del tiny.tensors["token_embd.weight"]
    read = dict(GgufFile(tiny.write()).tensors())["token_embd.weight"]
    assert np.abs(read.numpy() - values.numpy()).max() < 0.03
