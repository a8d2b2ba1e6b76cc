"""The decoder: one transformer, driven by its configuration, top to bottom.

Token ids, positions and paged KV in, logits out. Covers what `ModelConfig` can say: grouped-query
attention, rotary embeddings (plain, linear, llama3), biases, q/k norms, sliding windows, tied
embeddings. Norms are computed in float32; everything else in the weights' dtype.

T tokens of B sequences are one ragged batch; no tensor here is padded.

Several ranks may compute one model, each with its `Shard` of the weights and of the KV: what the
hidden state is, all of them know; heads and the MLP's inner values are each one's own. Then a layer
ends in two sums over the ranks, and rank 0 gathers the logits.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.attention import Attention, AttentionFactory, GatherAttention
from engine.batch import BatchInput
from engine.config import ModelConfig
from engine.kv_cache import KVCache
from engine.layer_groups import LayerGroups
from engine.linear import Linear
from engine.rope import rope_inv_freq
from engine.sampler import Sampler, TorchSampler
from engine.tp.collectives import Alone, Collectives
from engine.tp.shard import WHOLE, Shard
from engine.weights import LayerWeights, ModelWeights


class ModelOutput(NamedTuple):
    """Good until the next `forward`."""

    logits: Tensor
    """[L, vocab] float32, of the rows in `batch.logits_indices`; whole on rank 0 only."""
    hidden: Tensor
    """[T, hidden] what the last layer made of each token."""


class Model:
    """Stateless but for its weights. Not thread-safe with respect to the KV cache it writes."""

    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights,
        attention: AttentionFactory = GatherAttention,
        num_threads: int | None = None,
        shard: Shard = WHOLE,
        collectives: Collectives | None = None,
    ) -> None:
        """`config` is of the whole model, `weights` are the shard's."""
        self.config = shard.part_of(config)
        self.digest = weights.digest
        self.num_torch_threads = num_threads
        self.sampler: Sampler = TorchSampler()
        self.weights_nbytes = weights.nbytes
        self._weights = weights
        self._attention = attention
        self._collectives = collectives or Alone()
        inv_freq = rope_inv_freq(config.rope, config.head_dim)
        self._inv_freq = inv_freq.to(weights.embedding.device)  # [head_dim / 2] float32

    def forward(
        self,
        batch: BatchInput,
        kv: KVCache,
        groups: LayerGroups | None = None,
        attention: AttentionFactory | None = None,
    ) -> ModelOutput:
        """Writes K and V of the batch's tokens into `kv`. `attention`: another for this step."""
        hidden = self._hidden(batch, kv, (attention or self._attention)(batch, kv), groups)
        return ModelOutput(self.logits(hidden[batch.logits_indices]), hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, hidden], rows of what the last `forward` gave → [n, vocab] float32."""
        part = self._weights.lm_head(self._norm(hidden, self._weights.norm))
        return self._collectives.gather_columns(part, self.config.vocab_size).float()

    def _hidden(
        self, batch: BatchInput, kv: KVCache, attention: Attention, groups: LayerGroups | None
    ) -> Tensor:
        """What the last layer makes of each token, [T, hidden]."""
        hidden = F.embedding(batch.input_ids, self._weights.embedding)  # [T, hidden]
        cos, sin = self._rotation(batch.positions, hidden.dtype)
        for index, layer in enumerate(self._weights.layers):
            normed = self._norm(hidden, layer.input_norm)
            q, k, v = self._project(layer, normed, cos, sin)
            kv.write(index, k, v, batch.slot_mapping)
            hidden = hidden + self._collectives.sum(self._attend(attention, index, layer, q))
            normed = self._norm(hidden, layer.post_attention_norm)
            hidden = hidden + self._collectives.sum(_mlp(layer, normed))
            if groups is not None and index + 1 in groups.ends:
                groups.tell(index + 1)
        return hidden

    def prepare(self, kv: KVCache) -> None:
        """Nothing."""

    def close(self) -> None:
        """It has no threads of its own."""

    def _rotation(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos, sin, each [T, 1, head_dim / 2]; angles in float32."""
        angles = positions.unsqueeze(1).float() * self._inv_freq
        return angles.cos().to(dtype).unsqueeze(1), angles.sin().to(dtype).unsqueeze(1)

    def _project(
        self, layer: LayerWeights[Linear], x: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """x [T, hidden] → q [T, heads, head_dim]; k, v [T, kv_heads, head_dim], this rank's"""
        heads, kv_heads = self.config.num_heads, self.config.num_kv_heads
        qkv = layer.qkv(x).view(len(x), heads + 2 * kv_heads, self.config.head_dim)
        qk, v = qkv.split_with_sizes((heads + kv_heads, kv_heads), dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = qk.split_with_sizes((heads, kv_heads), dim=1)
            qk = torch.cat((self._norm(q, layer.q_norm), self._norm(k, layer.k_norm)), dim=1)
        q, k = _rotate(qk, cos, sin).split_with_sizes((heads, kv_heads), dim=1)
        return q, k, v

    def _attend(
        self, attention: Attention, index: int, layer: LayerWeights[Linear], q: Tensor
    ) -> Tensor:
        attended = attention(index, q, self.config.windows[index])
        return layer.o(attended.flatten(1))

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        # rms_norm itself computes in float32 and rounds once.
        return F.rms_norm(x, weight.shape, weight, self.config.rms_norm_eps)


def _mlp(layer: LayerWeights[Linear], x: Tensor) -> Tensor:
    gate, up = layer.gate_up(x).chunk(2, dim=-1)
    return layer.down(F.silu(gate) * up)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the pairs (i, i + head_dim / 2) of each head."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
