"""FlashInfer for captured steps of one token a sequence: plans that kernels find where they were.

A captured kernel keeps the addresses it was captured with. So there is a wrapper for each batch
size and window, all over the same buffers, and a plan for each before every replay; the grid does
not depend on lengths, so any length is good. Plans lie in one workspace a window: a step plans all
of its own before it runs.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from engine.attention import Attention, AttentionFactory
from engine.batch import BatchInput
from engine.cuda.flashinfer_attention import FlashInfer, HeadShape, PlanGuard
from engine.cuda.flashinfer_library import (
    INT_WORKSPACE_NBYTES,
    DecodeWrapper,
    use_tensor_cores,
    window_left,
)
from engine.cuda.page_table import NO_PAGES, padded, page_table
from engine.cuda.shapes import Shape, batch_sizes
from engine.host_copy import copy_to_device
from engine.kv_cache import KVCache


class FlashInferGraphs:
    """See the module. Engine thread only."""

    def __init__(
        self,
        flashinfer: FlashInfer,
        kv: KVCache,
        num_heads: int,
        windows: Iterable[int | None],
        max_num_seqs: int,
        max_blocks: int,
    ) -> None:
        self.shapes: Sequence[Shape] = [
            Shape(num_seqs, max_blocks) for num_seqs in batch_sizes(max_num_seqs)
        ]
        device = kv.device
        self._flashinfer = flashinfer
        self._kv = kv
        num_kv_heads, head_dim = kv.data.shape[-2:]
        self._heads = HeadShape(num_heads, num_kv_heads, head_dim, kv.block_size)
        self._indptr = torch.zeros(max_num_seqs + 1, dtype=torch.int32, device=device)
        # Sequences may share blocks, so that all of them may have more than the pool.
        self._indices = torch.zeros(max_num_seqs * max_blocks, dtype=torch.int32, device=device)
        self._last_page_len = torch.zeros(max_num_seqs, dtype=torch.int32, device=device)
        self._plans = {
            window: torch.zeros(INT_WORKSPACE_NBYTES, dtype=torch.uint8, device=device)
            for window in windows
        }
        self._wrappers: dict[tuple[int, int | None], tuple[DecodeWrapper, PlanGuard]] = {}

    def load(self, shape: Shape, batch: BatchInput | None) -> None:
        """Before a replay; None: nothing but padding."""
        table = NO_PAGES
        if batch is not None:
            tables, seq_lens = batch.block_tables_host, batch.seq_lens_host
            table = page_table(tables, seq_lens, self._kv.block_size)
        table = padded(table, shape.num_seqs, self._kv.scratch_block)
        host, device = copy_to_device(table, self._kv.device, torch.int32)
        for window in self._plans:
            wrapper, guard = self._wrapper(shape.num_seqs, window)
            with guard:
                wrapper.plan(
                    host[0],
                    device[1],
                    host[2],
                    *self._heads,
                    window_left=window_left(window),
                    q_data_type=self._kv.data.dtype,
                    kv_data_type=self._kv.data.dtype,
                )

    def factory(self, shape: Shape) -> AttentionFactory:
        """For the step that is captured; `load` before."""

        def attention(batch: BatchInput, kv: KVCache) -> Attention:
            return self._attention(shape.num_seqs, kv)

        return attention

    def _attention(self, num_seqs: int, kv: KVCache) -> Attention:
        def attend(layer: int, q: Tensor, window: int | None) -> Tensor:
            wrapper, _ = self._wrapper(num_seqs, window)
            out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
            return wrapper.run(q, kv.layer(layer), out=out)

        return attend

    def _wrapper(self, num_seqs: int, window: int | None) -> tuple[DecodeWrapper, PlanGuard]:
        key = num_seqs, window
        if key not in self._wrappers:
            self._wrappers[key] = self._open(num_seqs, window), PlanGuard(self._kv.device)
        return self._wrappers[key]

    def _open(self, num_seqs: int, window: int | None) -> DecodeWrapper:
        workspace = self._flashinfer.workspace
        wrapper = self._flashinfer.library.BatchDecodeWithPagedKVCacheWrapper(
            workspace,
            "NHD",
            use_cuda_graph=True,
            use_tensor_cores=use_tensor_cores(self._heads.num_heads, self._heads.num_kv_heads),
            paged_kv_indptr_buffer=self._indptr[: num_seqs + 1],
            paged_kv_indices_buffer=self._indices,
            paged_kv_last_page_len_buffer=self._last_page_len[:num_seqs],
            backend="fa2",
        )
        wrapper.reset_workspace_buffer(workspace, self._plans[window])
        return wrapper
