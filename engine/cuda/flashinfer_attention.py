"""Attention by FlashInfer over the paged pool: two kernels a layer at most, planned once a step.

1. The scheduler puts sequences with one new token first; as many rows as begin the batch like that
   go to the decode wrapper, all others to the prefill wrapper, which takes rows of any length. One
   wrapper for both would cut queries into tiles for the prompts' sake, and decodes would pay.
2. The first layer with a window plans it: indices on the host become one queued copy. Layers with
   the same window share the plan.
3. A plan's pinned memory is FlashInfer's own, and it does not ask whether the device has copied
   the last plan from there yet; and a step that samples nothing is not waited for. So there are two
   sets of wrappers, which take turns, and a plan waits for the one before last (`PlanGuard`).

Engine thread only.
"""

from types import TracebackType
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.attention import Attention
from engine.batch import BatchInput
from engine.cuda.flashinfer_library import (
    WORKSPACE_NBYTES,
    DecodeWrapper,
    Library,
    PrefillWrapper,
    use_tensor_cores,
    window_left,
)
from engine.cuda.page_table import page_table
from engine.host_copy import copy_to_device
from engine.kv_cache import KVCache

_TURNS = 2


class PlanGuard:
    """Around a plan: it waits until the device has copied the one before."""

    def __init__(self, device: torch.device) -> None:
        self._copied: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def __enter__(self) -> None:
        if self._copied is not None:
            self._copied.synchronize()  # sync point: of a step long past, as a rule

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._copied is not None:
            self._copied.record()


class HeadShape(NamedTuple):
    """What a plan depends on besides lengths."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int

    @classmethod
    def of(cls, q: Tensor, kv: KVCache) -> "HeadShape":
        """q [T, heads, head_dim]"""
        return cls(q.shape[1], kv.data.shape[-2], q.shape[2], kv.block_size)


class FlashInfer:
    """An `AttentionFactory`: its wrappers outlive the steps."""

    def __init__(self, library: Library, device: torch.device) -> None:
        self.library = library
        self.device = device
        self.workspace = torch.zeros(WORKSPACE_NBYTES, dtype=torch.uint8, device=device)
        self._wrappers: dict[tuple[int, int | None], _Wrappers] = {}
        self._turn = 0

    def __call__(self, batch: BatchInput, kv: KVCache) -> Attention:
        self._turn = (self._turn + 1) % _TURNS
        return FlashInferAttention(self, batch, kv)

    def wrappers(self, window: int | None, heads: HeadShape) -> "_Wrappers":
        """This step's, for layers with this window."""
        key = self._turn, window
        if key not in self._wrappers:
            self._wrappers[key] = _Wrappers(self, heads)
        return self._wrappers[key]


class _Wrappers:
    """One of each kind, with a plan each."""

    def __init__(self, owner: FlashInfer, heads: HeadShape) -> None:
        self.decode: DecodeWrapper = owner.library.BatchDecodeWithPagedKVCacheWrapper(
            owner.workspace,
            "NHD",
            use_cuda_graph=False,
            use_tensor_cores=use_tensor_cores(heads.num_heads, heads.num_kv_heads),
            paged_kv_indptr_buffer=None,
            paged_kv_indices_buffer=None,
            paged_kv_last_page_len_buffer=None,
            backend="fa2",
        )
        self.prefill: PrefillWrapper = owner.library.BatchPrefillWithPagedKVCacheWrapper(
            owner.workspace,
            "NHD",
            backend="auto",  # FlashAttention-3 where the card has it
        )
        self.guard = PlanGuard(owner.device)


class FlashInferAttention:
    """One step's; see the module."""

    def __init__(self, owner: FlashInfer, batch: BatchInput, kv: KVCache) -> None:
        self._owner = owner
        self._kv = kv
        self._rows = _Rows.of(batch, kv.block_size)
        self._planned: dict[int | None, _Wrappers] = {}

    def __call__(self, layer: int, q: Tensor, window: int | None) -> Tensor:
        if window not in self._planned:
            self._planned[window] = self._plan(q, window)
        wrappers, num_decodes = self._planned[window], self._rows.num_decodes
        pages = self._kv.layer(layer)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)  # q may be a view of qkv
        if num_decodes:
            wrappers.decode.run(q[:num_decodes], pages, out=out[:num_decodes])
        if num_decodes < len(q):
            wrappers.prefill.run(q[num_decodes:], pages, out=out[num_decodes:])
        return out

    def _plan(self, q: Tensor, window: int | None) -> _Wrappers:
        heads, rows = HeadShape.of(q, self._kv), self._rows
        wrappers = self._owner.wrappers(window, heads)
        with wrappers.guard:
            if rows.num_decodes:
                wrappers.decode.plan(
                    *rows.decode,
                    *heads,
                    window_left=window_left(window),
                    q_data_type=q.dtype,
                    kv_data_type=self._kv.data.dtype,
                )
            if rows.num_decodes < len(q):
                wrappers.prefill.plan(
                    rows.qo_indptr,
                    *rows.prefill,
                    *heads,
                    causal=True,
                    window_left=window_left(window),
                    q_data_type=q.dtype,
                    kv_data_type=self._kv.data.dtype,
                )
        return wrappers


class PageTensors(NamedTuple):
    """A `PageTable`, int32: lengths on the host, where they are planned with, pages on the
    device."""

    indptr: Tensor  # [R + 1] host
    indices: Tensor  # [indptr[R]] device
    last_page_len: Tensor  # [R] host


class _Rows(NamedTuple):
    """A step's rows, by wrapper; either may be none."""

    num_decodes: int
    """Rows with one new token that begin the batch."""
    decode: PageTensors
    prefill: PageTensors
    qo_indptr: Tensor  # [R + 1] host, of the prefill rows

    @classmethod
    def of(cls, batch: BatchInput, block_size: int) -> "_Rows":
        seqlens_q = np.array(batch.seqlens_q_host)
        longer = np.flatnonzero(seqlens_q > 1)
        split = int(longer[0]) if len(longer) else len(seqlens_q)
        parts = [
            page_table(batch.block_tables_host[rows], batch.seq_lens_host[rows], block_size)
            for rows in (slice(split), slice(split, None))
        ]
        qo_indptr = np.concatenate(([0], np.cumsum(seqlens_q[split:])))
        arrays = (*parts[0], *parts[1], qo_indptr)
        host, device = copy_to_device(arrays, batch.input_ids.device, torch.int32)
        return cls(
            num_decodes=split,
            decode=PageTensors(host[0], device[1], host[2]),
            prefill=PageTensors(host[3], device[4], host[5]),
            qo_indptr=host[6],
        )
