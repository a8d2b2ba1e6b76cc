"""The decoder on a card: steps of one token a sequence are replayed, all others run as they come.

A step of a small batch is hundreds of kernels of a few microseconds, and Python is slower to launch
them than the card to run them; a graph is one launch.

1. `prepare` captures the model once for each shape, the largest first: all share its memory.
2. `forward` of a batch that fits copies its ids, positions and slots to where the graph reads them,
   has the attention load lengths and block tables, and replays. Rows that are missing write the KV
   of token 0 into the pool's scratch block, and nobody reads what they give.
3. A batch with a prompt in it, or wider than all shapes, goes to the model as it is.

With a capture that only repeats, the same runs on any device; so the tests have it.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from engine.attention import AttentionFactory
from engine.batch import BatchInput, no_host_data
from engine.config import ModelError
from engine.cuda.capture import Capture, Work
from engine.cuda.shapes import Shape, find
from engine.kv_cache import KVCache
from engine.layer_groups import LayerGroups
from engine.model import Model, ModelOutput

logger = logging.getLogger(__name__)


class GraphAttention(Protocol):
    """Attention whose inputs have a fixed address."""

    shapes: Sequence[Shape]

    def load(self, shape: Shape, batch: BatchInput | None) -> None:
        """The batch's lengths and block tables, before a replay; None: nothing but padding."""

    def factory(self, shape: Shape) -> AttentionFactory:
        """For the step that is captured: it may look at no batch on the host."""
        ...


class GraphedModel:
    """A `Decoder`; see the module."""

    def __init__(
        self,
        model: Model,
        attention: Callable[[KVCache], GraphAttention],
        capture: Capture,
    ) -> None:
        self.model = model
        self.digest = model.digest
        self.num_torch_threads = model.num_torch_threads
        self.sampler = model.sampler
        self.weights_nbytes = model.weights_nbytes
        self._open_attention = attention
        self._capture = capture
        self._replays: dict[Shape, Work] = {}
        self._kv: KVCache | None = None

    @torch.no_grad()
    def prepare(self, kv: KVCache) -> None:
        """Captures, over this cache, which has a scratch block. Raises ModelError, if there is no
        memory left for it."""
        self._kv = kv
        self._attention = attention = self._open_attention(kv)
        if not attention.shapes:
            return
        num_seqs = max(shape.num_seqs for shape in attention.shapes)
        config, dtype, device = self.model.config, kv.data.dtype, kv.device
        scratch = kv.scratch_block * kv.block_size
        self._padding = torch.tensor([[0], [0], [scratch]], device=device)
        self._tokens = self._padding.repeat(1, num_seqs)  # ids, positions, slots
        self._logits = torch.empty((num_seqs, config.vocab_size), device=device)  # float32
        self._hidden = torch.empty((num_seqs, config.hidden_size), dtype=dtype, device=device)
        try:
            for shape in sorted(attention.shapes, reverse=True):
                self._load(shape, None)
                self._replays[shape] = self._capture(self._work(shape, kv))
        except torch.OutOfMemoryError as error:
            raise ModelError(
                f"no device memory is left to capture steps of {shape.num_seqs} sequences: give "
                "the KV pool less (--kv-memory), or do without (--no-cuda-graphs)"
            ) from error
        logger.info("captured %d steps of up to %d sequences", len(self._replays), num_seqs)

    def forward(
        self, batch: BatchInput, kv: KVCache, groups: LayerGroups | None = None
    ) -> ModelOutput:
        """Writes K and V of the batch's tokens into `kv`."""
        shape = self.shape_of(batch, kv)
        if shape is None:
            return self.model.forward(batch, kv, groups)
        self._load(shape, batch)
        self._replays[shape]()
        num_seqs = len(batch.seq_lens_host)
        logits = self._logits[:num_seqs]
        if len(batch.logits_indices) < num_seqs:
            logits = logits[batch.logits_indices]
        return ModelOutput(logits, self._hidden[:num_seqs])

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, hidden], rows of what the last `forward` gave → [n, vocab] float32."""
        return self.model.logits(hidden)

    def close(self) -> None:
        self._replays.clear()
        self.model.close()

    def shape_of(self, batch: BatchInput, kv: KVCache) -> Shape | None:
        """The graph that this batch is replayed with; None: none."""
        if kv is not self._kv or max(batch.seqlens_q_host) > 1:
            return None
        num_blocks = -(-max(batch.seq_lens_host) // kv.block_size)
        return find(self._replays, len(batch.seq_lens_host), num_blocks)

    def _load(self, shape: Shape, batch: BatchInput | None) -> None:
        num_seqs = 0
        if batch is not None:
            num_seqs = len(batch.input_ids)
            rows = (batch.input_ids, batch.positions, batch.slot_mapping)
            for row, values in zip(self._tokens, rows, strict=True):
                row[:num_seqs].copy_(values)
        if num_seqs < shape.num_seqs:
            self._tokens[:, num_seqs : shape.num_seqs] = self._padding
        self._attention.load(shape, batch)

    def _work(self, shape: Shape, kv: KVCache) -> Work:
        input_ids, positions, slots = self._tokens[:, : shape.num_seqs]
        batch = no_host_data(input_ids, positions, slots)
        factory = self._attention.factory(shape)

        def work() -> None:
            output = self.model.forward(batch, kv, attention=factory)
            self._logits[: shape.num_seqs].copy_(output.logits)
            self._hidden[: shape.num_seqs].copy_(output.hidden)

        return work
