"""Weights: read from a checkpoint in the decoder's order.

Knows the tensor names of Hugging Face checkpoints and nothing of computing with them. Each tensor
is copied once, to its place in a fused matrix on the device; what becomes of a layer's matrices is
up to the model that reads them, a layer at a time. Along the way the reader samples every tensor
into a digest, which is the same for the same weights in another folder, in other files and on
another device.

A rank that computes a part of the model (`Shard`) keeps its part of each tensor. It reads the
samples for the digest out of the whole ones all the same, so the digest is that of one rank.
"""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from engine.checkpoint import Checkpoint, RandomCheckpoint, SafetensorsCheckpoint
from engine.config import ModelConfig
from engine.linear import Linear
from engine.tp.shard import WHOLE, Shard

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
    qkv: _Projection  # hidden → (heads + 2 * kv_heads) * head_dim, of this rank's heads
    q_norm: Tensor | None  # [head_dim]
    k_norm: Tensor | None  # [head_dim]
    o: _Projection  # heads * head_dim → hidden
    post_attention_norm: Tensor  # [hidden]
    gate_up: _Projection  # hidden → 2 * intermediate, this rank's
    down: _Projection  # intermediate → hidden


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """For engine/model.py."""

    embedding: Tensor  # [vocab, hidden]
    layers: tuple[LayerWeights[Linear], ...]
    norm: Tensor  # [hidden]
    lm_head: Linear  # hidden → vocab, this rank's
    digest: bytes
    """32 bytes over names, shapes and samples of the tensors as this dtype holds them."""
    nbytes: int

    @classmethod
    def read(cls, reader: "WeightReader") -> "ModelWeights":
        embedding = reader.embedding()
        layers = tuple(_with_linears(layer) for layer in reader.layers())
        norm, lm_head = reader.norm(), Linear(*reader.lm_head())
        return cls(embedding, layers, norm, lm_head, reader.digest(), reader.nbytes)


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


def load_weights(
    folder: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    shard: Shard = WHOLE,
) -> ModelWeights:
    """Raises ModelError, naming the tensor or file, for anything missing, misshapen or unknown."""
    return read_weights(folder, config, dtype, device, ModelWeights.read, shard)


def read_weights(
    folder: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    build: Callable[["WeightReader"], _Model],
    shard: Shard = WHOLE,
) -> _Model:
    """What `build` makes of the folder's weights. Raises as `load_weights`."""
    with SafetensorsCheckpoint(folder) as checkpoint:
        model = build(WeightReader(config, checkpoint, dtype, device, shard))
        checkpoint.refuse_unread()
    return model


def random_weights(
    config: ModelConfig, seed: int, dtype: torch.dtype, device: torch.device
) -> ModelWeights:
    """The same values for the same seed whatever the dtype, up to its rounding."""
    return ModelWeights.read(random_reader(config, seed, dtype, device))


def random_reader(
    config: ModelConfig,
    seed: int,
    dtype: torch.dtype,
    device: torch.device,
    shard: Shard = WHOLE,
) -> "WeightReader":
    return WeightReader(config, RandomCheckpoint(seed), dtype, device, shard)


class WeightReader:
    """Reads a checkpoint, and digests it on the way: `embedding`, `layers`, `norm`, `lm_head`, each
    once and in this order, then `digest`."""

    def __init__(
        self,
        config: ModelConfig,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        device: torch.device,
        shard: Shard = WHOLE,
    ) -> None:
        self.config = config
        self.dtype = dtype
        self.shard = shard
        self._checkpoint = checkpoint
        self._device = device
        self._hash = hashlib.sha256()
        self._tied: Tensor | None = None
        self.nbytes = 0
        """Of the tensors read so far, as they are kept."""

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
        """hidden → this rank's part of the vocabulary."""
        vocab, hidden = self.config.vocab_size, self.config.hidden_size
        rows = self.shard.cut(vocab)
        if self._tied is not None:
            return Matrix(self._tied[rows.start : rows.stop], None)
        return self._columns("", {"lm_head": (vocab, rows)}, hidden, False)

    def digest(self) -> bytes:
        return self._hash.digest()

    def _layer(self, at: str) -> LayerWeights[Matrix]:
        config = self.config
        hidden, inner, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
        q_size, kv_size = config.num_heads * head_dim, config.num_kv_heads * head_dim
        q_part, kv_part = (
            range(heads.start * head_dim, heads.stop * head_dim)
            for heads in (self.shard.heads(config), self.shard.kv_heads(config))
        )
        qkv = {
            "q_proj": (q_size, q_part),
            "k_proj": (kv_size, kv_part),
            "v_proj": (kv_size, kv_part),
        }
        inner_part = self.shard.cut(inner)
        gate_up = {"gate_proj": (inner, inner_part), "up_proj": (inner, inner_part)}
        attention, mlp = f"{at}.self_attn.", f"{at}.mlp."
        head_norm = (head_dim,)
        return LayerWeights(
            input_norm=self._tensor(f"{at}.input_layernorm", (hidden,)),
            qkv=self._columns(attention, qkv, hidden, config.qkv_bias),
            q_norm=self._tensor(f"{attention}q_norm", head_norm) if config.qk_norm else None,
            k_norm=self._tensor(f"{attention}k_norm", head_norm) if config.qk_norm else None,
            o=self._rows(f"{attention}o_proj", hidden, q_size, q_part, config.o_bias),
            post_attention_norm=self._tensor(f"{at}.post_attention_layernorm", (hidden,)),
            gate_up=self._columns(mlp, gate_up, hidden, config.mlp_bias),
            down=self._rows(f"{mlp}down_proj", hidden, inner, inner_part, config.mlp_bias),
        )

    def _tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        return self._whole(f"{name}.weight", shape)

    def _columns(
        self, at: str, parts: dict[str, tuple[int, range]], num_in: int, has_bias: bool
    ) -> Matrix:
        """Matrices that share their input, one under the other; of each its number of outputs, and
        those that are this rank's."""
        weights, biases = (
            [(f"{at}{name}.{kind}", (n, *tail), own) for name, (n, own) in parts.items()]
            for kind, tail in (("weight", (num_in,)), ("bias", ()))
        )
        return Matrix(self._fused(weights), self._fused(biases) if has_bias else None)

    def _rows(self, name: str, num_out: int, num_in: int, own: range, has_bias: bool) -> Matrix:
        """What this rank's inputs add to the outputs. The bias is rank 0's to add."""
        stored = self._read(f"{name}.weight", (num_out, num_in))
        weight = torch.empty((num_out, len(own)), dtype=self.dtype, device=self._device)
        weight.copy_(stored[:, own.start : own.stop])
        self.nbytes += weight.nbytes
        bias = self._whole(f"{name}.bias", (num_out,)) if has_bias else None
        return Matrix(weight, bias if self.shard.rank == 0 else None)

    def _whole(self, name: str, shape: tuple[int, ...]) -> Tensor:
        return self._fused([(name, shape, range(shape[0]))])

    def _fused(self, parts: list[tuple[str, tuple[int, ...], range]]) -> Tensor:
        """Names, shapes and the rows to keep of each."""
        sizes = [len(own) for _, _, own in parts]
        fused = torch.empty((sum(sizes), *parts[0][1][1:]), dtype=self.dtype, device=self._device)
        self.nbytes += fused.nbytes
        for (name, shape, own), place in zip(parts, fused.split_with_sizes(sizes), strict=True):
            place.copy_(self._read(name, shape)[own.start : own.stop])
        return fused

    def _read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        stored = self._checkpoint.read(name, shape)
        self._digest(name, stored)
        return stored

    def _digest(self, name: str, stored: Tensor) -> None:
        flat = stored.flatten()
        samples = flat[:: max(1, flat.numel() // _DIGEST_SAMPLES)].to(self.dtype).contiguous()
        self._hash.update(f"{name} {list(stored.shape)}\n".encode())
        self._hash.update(samples.view(torch.uint8).numpy().tobytes())
