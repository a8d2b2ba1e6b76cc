"""Weights: read from safetensors, or drawn at random, in the decoder's order.

Knows the tensor names of Hugging Face checkpoints and nothing of computing with them. Files are
mapped into memory, and each tensor is copied once, to its place in a fused matrix on the device;
what becomes of a layer's matrices is up to the model that reads them, a layer at a time. Along the
way the reader samples every tensor into a digest, which is the same for the same weights in another
folder, in other shards and on another device.
"""

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, NamedTuple, Protocol, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.config import ModelConfig, ModelError
from engine.linear import Linear

_Projection = TypeVar("_Projection")
_Model = TypeVar("_Model")

_DIGEST_SAMPLES = 64
"""Values of each tensor that go into the digest."""


class Matrix(NamedTuple):
    weight: Tensor  # [out, in]
    bias: Tensor | None  # [out]


@dataclass(frozen=True, slots=True)
class LayerWeights(Generic[_Projection]):
    input_norm: Tensor  # [hidden]
    qkv: _Projection  # hidden → (heads + 2 * kv_heads) * head_dim
    q_norm: Tensor | None  # [head_dim]
    k_norm: Tensor | None  # [head_dim]
    o: _Projection  # heads * head_dim → hidden
    post_attention_norm: Tensor  # [hidden]
    gate_up: _Projection  # hidden → 2 * intermediate
    down: _Projection  # intermediate → hidden


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """For engine/model.py."""

    embedding: Tensor  # [vocab, hidden]
    layers: tuple[LayerWeights[Linear], ...]
    norm: Tensor  # [hidden]
    lm_head: Linear  # hidden → vocab
    digest: bytes
    """32 bytes over names, shapes and samples of the tensors as this dtype holds them."""

    @classmethod
    def read(cls, reader: "WeightReader") -> "ModelWeights":
        embedding = reader.embedding()
        layers = tuple(_with_linears(layer) for layer in reader.layers())
        norm, lm_head = reader.norm(), Linear(*reader.lm_head())
        return cls(embedding, layers, norm, lm_head, reader.digest())


def _with_linears(layer: LayerWeights[Matrix]) -> LayerWeights[Linear]:
    return LayerWeights(
        input_norm=layer.input_norm,
        qkv=Linear(*layer.qkv),
        q_norm=layer.q_norm,
        k_norm=layer.k_norm,
        o=Linear(*layer.o),
        post_attention_norm=layer.post_attention_norm,
        gate_up=Linear(*layer.gate_up),
        down=Linear(*layer.down),
    )


class Checkpoint(Protocol):
    """Where tensors come from."""

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The tensor, on the CPU, in any dtype. Raises ModelError if there is none like it."""
        ...


def load_weights(
    folder: Path, config: ModelConfig, dtype: torch.dtype, device: torch.device
) -> ModelWeights:
    """Raises ModelError, naming the tensor or file, for anything missing, misshapen or unknown."""
    return read_weights(folder, config, dtype, device, ModelWeights.read)


def read_weights(
    folder: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    build: Callable[["WeightReader"], _Model],
) -> _Model:
    """What `build` makes of the folder's weights. Raises as `load_weights`."""
    with _SafetensorsCheckpoint(folder) as checkpoint:
        model = build(WeightReader(config, checkpoint, dtype, device))
        checkpoint.refuse_unread()
    return model


def random_weights(
    config: ModelConfig, seed: int, dtype: torch.dtype, device: torch.device
) -> ModelWeights:
    """The same values for the same seed whatever the dtype, up to its rounding."""
    return ModelWeights.read(random_reader(config, seed, dtype, device))


def random_reader(
    config: ModelConfig, seed: int, dtype: torch.dtype, device: torch.device
) -> "WeightReader":
    return WeightReader(config, _RandomCheckpoint(seed), dtype, device)


class _RandomCheckpoint:
    def __init__(self, seed: int) -> None:
        self._seed = seed

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        if name.endswith("norm.weight"):
            return torch.ones(shape)
        key = hashlib.sha256(f"{self._seed} {name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(key[:7], "little"))
        return torch.randn(shape, generator=generator) / math.sqrt(shape[-1])


class _SafetensorsCheckpoint:
    """Every *.safetensors of a folder, or those that its index names."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open_files = ExitStack()
        self._files: dict[str, safe_open] = {}
        self._unread: set[str] = set()

    def __enter__(self) -> "_SafetensorsCheckpoint":
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


class WeightReader:
    """Reads a checkpoint, and digests it on the way: `embedding`, `layers`, `norm`, `lm_head`, each
    once and in this order, then `digest`."""

    def __init__(
        self,
        config: ModelConfig,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.config = config
        self.dtype = dtype
        self._checkpoint = checkpoint
        self._device = device
        self._hash = hashlib.sha256()
        self._tied: Tensor | None = None

    def embedding(self) -> Tensor:
        """[vocab, hidden]"""
        config = self.config
        embedding = self._tensor("model.embed_tokens", (config.vocab_size, config.hidden_size))
        if config.tie_word_embeddings:
            self._tied = embedding
        return embedding

    def layers(self) -> Iterator[LayerWeights[Matrix]]:
        for index in range(self.config.num_layers):
            yield self._layer(f"model.layers.{index}")

    def norm(self) -> Tensor:
        """[hidden], the last one."""
        return self._tensor("model.norm", (self.config.hidden_size,))

    def lm_head(self) -> Matrix:
        if self._tied is not None:
            return Matrix(self._tied, None)
        return self._linear("", {"lm_head": self.config.vocab_size}, self.config.hidden_size, False)

    def digest(self) -> bytes:
        return self._hash.digest()

    def _layer(self, at: str) -> LayerWeights[Matrix]:
        config = self.config
        hidden, inner, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
        q_size, kv_size = config.num_heads * head_dim, config.num_kv_heads * head_dim
        qkv = {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}
        gate_up = {"gate_proj": inner, "up_proj": inner}
        attention, mlp = f"{at}.self_attn.", f"{at}.mlp."
        head_norm = (head_dim,)
        return LayerWeights(
            input_norm=self._tensor(f"{at}.input_layernorm", (hidden,)),
            qkv=self._linear(attention, qkv, hidden, config.qkv_bias),
            q_norm=self._tensor(f"{attention}q_norm", head_norm) if config.qk_norm else None,
            k_norm=self._tensor(f"{attention}k_norm", head_norm) if config.qk_norm else None,
            o=self._linear(attention, {"o_proj": hidden}, q_size, config.o_bias),
            post_attention_norm=self._tensor(f"{at}.post_attention_layernorm", (hidden,)),
            gate_up=self._linear(mlp, gate_up, hidden, config.mlp_bias),
            down=self._linear(mlp, {"down_proj": hidden}, inner, config.mlp_bias),
        )

    def _tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        return self._fused([(f"{name}.weight", shape)])

    def _linear(self, at: str, parts: dict[str, int], num_in: int, has_bias: bool) -> Matrix:
        """Parts that share their input, one under the other."""
        weight = self._fused([(f"{at}{part}.weight", (n, num_in)) for part, n in parts.items()])
        if not has_bias:
            return Matrix(weight, None)
        bias = self._fused([(f"{at}{part}.bias", (n,)) for part, n in parts.items()])
        return Matrix(weight, bias)

    def _fused(self, parts: list[tuple[str, tuple[int, ...]]]) -> Tensor:
        num_rows = sum(shape[0] for _, shape in parts)
        fused = torch.empty((num_rows, *parts[0][1][1:]), dtype=self.dtype, device=self._device)
        for (name, shape), place in zip(
            parts, fused.split_with_sizes([shape[0] for _, shape in parts]), strict=True
        ):
            stored = self._checkpoint.read(name, shape)
            self._digest(name, stored)
            place.copy_(stored)
        return fused

    def _digest(self, name: str, stored: Tensor) -> None:
        flat = stored.flatten()
        samples = flat[:: max(1, flat.numel() // _DIGEST_SAMPLES)].to(self.dtype).contiguous()
        self._hash.update(f"{name} {list(stored.shape)}\n".encode())
        self._hash.update(samples.view(torch.uint8).numpy().tobytes())
