"""Where a model's tensors come from: safetensors of a folder, or thin air."""

import hashlib
import json
import math
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.config import ModelError


class Checkpoint(Protocol):
    """Where tensors come from."""

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The tensor, on the CPU, in any dtype. Raises ModelError if there is none like it."""
        ...


class RandomCheckpoint:
    """Any tensor, drawn: the same for the same seed and name."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        if name.endswith("norm.weight"):
            return torch.ones(shape)
        key = hashlib.sha256(f"{self._seed} {name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(key[:7], "little"))
        return torch.randn(shape, generator=generator) / math.sqrt(shape[-1])


class SafetensorsCheckpoint:
    """Every *.safetensors of a folder, or those that its index names, mapped into memory."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open_files = ExitStack()
        self._files: dict[str, safe_open] = {}
        self._unread: set[str] = set()

    def __enter__(self) -> "SafetensorsCheckpoint":
        with ExitStack() as opening:
            for path in self._paths():
                try:
                    file = opening.enter_context(safe_open(path, framework="pt"))
                except (OSError, SafetensorError) as error:
                    raise ModelError(f"{path} cannot be read: {error}") from error
                self._files.update(dict.fromkeys(file.keys(), file))
            self._open_files = opening.pop_all()
        self._unread = set(self._files)
        return self

    def __exit__(self, *_: object) -> None:
        self._open_files.close()

    def _paths(self) -> Sequence[Path]:
        index = self._folder / "model.safetensors.index.json"
        if not index.exists():
            paths = sorted(self._folder.glob("*.safetensors"))
            if not paths:
                raise ModelError(f"{self._folder} holds no *.safetensors")
            return paths
        try:
            names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelError(f"{index} cannot be read: {error!r}") from error
        return [self._folder / name for name in sorted(names)]

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        if name not in self._files:
            raise ModelError(f"{self._folder}: there is no tensor {name}")
        tensor: Tensor = self._files[name].get_tensor(name)  # type: ignore[no-untyped-call]  # mapped
        if tensor.shape != shape:
            raise ModelError(
                f"{self._folder}: {name} is {list(tensor.shape)}, the config says {list(shape)}"
            )
        self._unread.discard(name)
        return tensor

    def refuse_unread(self) -> None:
        """A tensor we would ignore is a computation we would leave out."""
        ignored = {"lm_head.weight"}  # stored although tied
        left = [n for n in self._unread - ignored if not n.endswith("rotary_emb.inv_freq")]
        if left:
            raise ModelError(f"{self._folder}: unknown tensors, the first is {min(left)}")
