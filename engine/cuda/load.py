"""What a card gets beside the model's weights: FlashInfer made ready, or the reason why not, found
out when a worker starts and not in its first request; and graphs."""

import dataclasses
import logging
import traceback
from contextlib import nullcontext

import numpy as np
import torch

from engine.attention import AttentionFactory
from engine.batch import BatchInput, BatchRow
from engine.config import ModelConfig, ModelError
from engine.cuda.capture import Capture
from engine.cuda.flashinfer_attention import FlashInfer
from engine.cuda.flashinfer_graphs import FlashInferGraphs
from engine.cuda.flashinfer_library import load
from engine.cuda.graphed_model import GraphAttention, GraphedModel
from engine.cuda.padded_attention import PaddedAttention
from engine.engine_config import EngineConfig
from engine.kv_cache import KVCache
from engine.model import Model

logger = logging.getLogger(__name__)

_ERRORS = (RuntimeError, ValueError, NotImplementedError, OSError, ImportError, AssertionError)
"""What FlashInfer raises where a card, a compiler or a shape is not to its liking. An assertion of
ours is no reason to do without it, but a bug."""
_PAGES = np.arange(2, dtype=np.int64)
_ROWS = (
    BatchRow(np.zeros(1, dtype=np.int64), 1, _PAGES, wants_logits=True),
    BatchRow(np.zeros(2, dtype=np.int64), 0, _PAGES, wants_logits=True),
)


def open_flashinfer(
    model: ModelConfig, dtype: torch.dtype, device: torch.device, block_size: int
) -> FlashInfer:
    """Its kernels for this model are compiled then: minutes, the first time on a machine, unless
    flashinfer-jit-cache has them. Raises ModelError."""
    logger.info("trying FlashInfer, which may compile kernels: minutes, the first time")
    try:
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            flashinfer = FlashInfer(load(), device)
            try_out(flashinfer, model, dtype, block_size)
    except _ERRORS as error:
        if isinstance(error, AssertionError) and _is_ours(error):
            raise
        text = str(error).strip() or type(error).__name__
        raise ModelError(f"FlashInfer fails: {text.splitlines()[0]}") from error
    return flashinfer


def _is_ours(error: Exception) -> bool:
    """Whether code of this package raised it."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    module: str = frame.f_globals["__name__"]
    return module.partition(".")[0] == __name__.partition(".")[0]


def try_out(
    flashinfer: FlashInfer, model: ModelConfig, dtype: torch.dtype, block_size: int
) -> None:
    """Both kinds of rows, all windows, on blocks of nobody's. Raises what FlashInfer raises."""
    one_layer = dataclasses.replace(model, num_layers=1, windows=model.windows[:1])
    kv = KVCache(one_layer, len(_PAGES), block_size, dtype, flashinfer.device)
    batch = BatchInput.build(_ROWS, block_size, flashinfer.device)
    shape = (len(batch.input_ids), model.num_heads, model.head_dim)
    q = torch.zeros(shape, dtype=dtype, device=flashinfer.device)
    step = flashinfer(batch, kv)
    for window in dict.fromkeys(model.windows):
        step(0, q, window)
    if flashinfer.device.type == "cuda":
        torch.cuda.synchronize(flashinfer.device)  # sync point: before the first step


def with_graphs(
    model: Model, attention: AttentionFactory, config: EngineConfig, capture: Capture
) -> GraphedModel:
    """`attention` is the model's own."""

    def graphs(kv: KVCache) -> GraphAttention:
        num_seqs = min(config.max_num_seqs, config.token_budget)
        longest = config.resolve_max_model_len(model.config)
        max_blocks = min(-(-longest // kv.block_size), kv.num_blocks)
        if not isinstance(attention, FlashInfer):
            return PaddedAttention(kv, num_seqs, max_blocks)
        windows = dict.fromkeys(model.config.windows)
        heads = model.config.num_heads
        return FlashInferGraphs(attention, kv, heads, windows, num_seqs, max_blocks)

    return GraphedModel(model, graphs, capture)
