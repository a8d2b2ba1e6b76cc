"""GGUF → the tokenizer files of a Hugging Face folder.

transformers reads vocabulary, merges, special tokens and chat template out of a GGUF, but not
`tokenizer.ggml.pre`, the rule that cuts text before byte-pair merging; the round trip still works
then, and the ids are wrong. The rule is put back here, and one we do not know is refused.
"""

import json
from collections.abc import Mapping
from pathlib import Path

from engine.errors import UnsupportedModel
from engine.gguf_file import GgufFile

_Step = Mapping[str, object]


def _split(pattern: str) -> _Step:
    return {
        "type": "Split",
        "pattern": {"Regex": pattern},
        "behavior": "Isolated",
        "invert": False,
    }


def _byte_level(use_regex: bool) -> _Step:
    """`use_regex`: cut words as GPT-2 does, before turning bytes into letters."""
    return {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": use_regex,
    }


_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# By llama.cpp's name of the rule, in the terms of tokenizer.json.
_PRE_TOKENIZERS: Mapping[str, tuple[_Step, ...]] = {
    "smollm": ({"type": "Digits", "individual_digits": True}, _byte_level(use_regex=True)),
    "qwen2": (_split(_WORDS % ""), _byte_level(use_regex=False)),
    "llama-bpe": (_split(_WORDS % "{1,3}"), _byte_level(use_regex=False)),
}


def convert_tokenizer(source: GgufFile, out: Path) -> None:
    """Writes tokenizer.json, tokenizer_config.json and, where the file has one,
    chat_template.jinja. Raises UnsupportedModel for a tokenizer it would get wrong."""
    from transformers import AutoTokenizer  # takes a second; most runs have nothing to convert

    pre_tokenizer = _pre_tokenizer(source)
    tokenizer = AutoTokenizer.from_pretrained(source.path.parent, gguf_file=source.path.name)
    tokenizer.model_max_length = source.integer("context_length")  # comes out as 1e30
    tokenizer.save_pretrained(out)
    if pre_tokenizer is not None:
        path = out / "tokenizer.json"
        parts = json.loads(path.read_text(encoding="utf-8"))
        parts["pre_tokenizer"] = pre_tokenizer
        path.write_text(json.dumps(parts, ensure_ascii=False), encoding="utf-8")


def _pre_tokenizer(source: GgufFile) -> _Step | None:
    """None: a SentencePiece tokenizer, which cuts nothing beforehand."""
    kind = source.get("tokenizer.ggml.model")
    if kind == "llama":
        return None
    rule = str(source.get("tokenizer.ggml.pre", "default"))
    if kind != "gpt2" or rule not in _PRE_TOKENIZERS:
        known = ", ".join(_PRE_TOKENIZERS)
        raise UnsupportedModel(f"GGUF tokenizer {kind} with rule {rule!r}; supported are {known}")
    return {"type": "Sequence", "pretokenizers": list(_PRE_TOKENIZERS[rule])}
