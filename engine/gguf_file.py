"""A GGUF file, typed: metadata and dequantized tensors, of the model families we can run.

A thin reader over the `gguf` package, the only place that knows it.
"""

from collections.abc import Iterator
from pathlib import Path

import gguf
import torch
from torch import Tensor

from engine.config import ModelError
from engine.errors import UnsupportedModel

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


class GgufFile:
    """A GGUF file's metadata, typed, and its tensors."""

    def __init__(self, path: Path) -> None:
        """Raises ModelError if it is not a GGUF file."""
        try:
            self._reader = gguf.GGUFReader(path)
        except (OSError, ValueError, IndexError) as error:
            raise ModelError(f"{path} is not a readable GGUF file: {error}") from error
        self.path = path
        self.family = str(self.get("general.architecture"))
        if self.family not in ARCHITECTURES:
            known = ", ".join(ARCHITECTURES)
            raise UnsupportedModel(f"GGUF architecture {self.family}; supported are {known}")

    def get(self, key: str, default: object = None) -> object:
        field = self._reader.get_field(key)
        return default if field is None else field.contents()

    def integer(self, key: str, default: int | None = None) -> int:
        """`key` within the family: llama.block_count, …"""
        value = self.get(f"{self.family}.{key}", default)
        if not isinstance(value, int):
            raise ModelError(f"{self.path}: {self.family}.{key} is {value!r}, not an integer")
        return value

    def number(self, key: str, default: float) -> float:
        value = self.get(f"{self.family}.{key}", default)
        if not isinstance(value, int | float):
            raise ModelError(f"{self.path}: {self.family}.{key} is {value!r}, not a number")
        return value

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Outermost dimension first, as torch has it."""
        return {t.name: tuple(int(n) for n in reversed(t.shape)) for t in self._reader.tensors}

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Dequantized to float32, one at a time."""
        for t in self._reader.tensors:
            values = gguf.quants.dequantize(t.data, t.tensor_type)
            yield t.name, torch.tensor(values).view(tuple(int(n) for n in reversed(t.shape)))
