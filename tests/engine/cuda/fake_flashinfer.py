"""FlashInfer's paged wrappers by their documented contract (0.7), in plain torch on any device.

What `plan` may look at are lengths, on the host; what `run` may look at is q, pages and what plan
copied. As in the library, a plan lies in a workspace of the wrapper's and is gone when anyone else
plans into the same one, and a wrapper for graphs has one batch size and reads the buffers that it
was given. Attention is in float64.
"""

import itertools
from typing import NamedTuple

import torch
from torch import Tensor

from engine.cuda.flashinfer_library import KVPages


class _Plan(NamedTuple):
    serial: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    window_left: int
    q_dtype: torch.dtype
    kv_dtype: torch.dtype
    causal: bool
    num_rows: int


class FakeFlashInfer:
    """Stands in for the module."""

    def __init__(self) -> None:
        self.num_plans = 0
        self.num_wrappers = 0

    def BatchPrefillWithPagedKVCacheWrapper(
        self, float_workspace_buffer: Tensor, kv_layout: str, *, backend: str
    ) -> "FakePrefill":
        assert backend in ("auto", "fa2", "fa3")
        return FakePrefill(self, float_workspace_buffer, kv_layout)

    def BatchDecodeWithPagedKVCacheWrapper(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str,
        *,
        use_cuda_graph: bool,
        use_tensor_cores: bool,
        paged_kv_indptr_buffer: Tensor | None,
        paged_kv_indices_buffer: Tensor | None,
        paged_kv_last_page_len_buffer: Tensor | None,
        backend: str,
    ) -> "FakeDecode":
        assert backend in ("auto", "fa2", "fa3")
        buffers = None
        if use_cuda_graph:
            assert paged_kv_indptr_buffer is not None
            assert paged_kv_indices_buffer is not None
            assert paged_kv_last_page_len_buffer is not None
            buffers = paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer
            assert len(buffers[0]) == len(buffers[2]) + 1
        return FakeDecode(self, float_workspace_buffer, kv_layout, use_tensor_cores, buffers)


class _Wrapper:
    def __init__(self, library: FakeFlashInfer, workspace: Tensor, kv_layout: str) -> None:
        assert kv_layout == "NHD"
        assert workspace.dtype is torch.uint8
        self._library = library
        library.num_wrappers += 1
        self._device = workspace.device
        self._int_workspace = torch.zeros(8, dtype=torch.uint8, device=self._device)
        self._plan_of: _Plan | None = None
        self._buffers: tuple[Tensor, Tensor, Tensor] | None = None
        self._is_fixed = False

    def _take(self, indptr: Tensor, indices: Tensor, last_page_len: Tensor, plan: _Plan) -> None:
        assert {indptr.dtype, indices.dtype, last_page_len.dtype} == {torch.int32}
        assert indptr.device.type == last_page_len.device.type == "cpu"
        assert indices.device == self._device
        pages = indptr.tolist()
        assert pages[0] == 0
        assert pages[-1] == len(indices)
        assert all(first < end for first, end in itertools.pairwise(pages)), pages
        assert len(pages) == len(last_page_len) + 1
        assert ((last_page_len >= 1) & (last_page_len <= plan.page_size)).all()
        assert plan.num_heads % plan.num_kv_heads == 0
        if self._is_fixed:
            assert self._buffers is not None
            assert len(self._buffers[2]) == len(last_page_len), "one batch size"
            assert len(indices) <= len(self._buffers[1])
            self._buffers[0].copy_(indptr)
            self._buffers[1][: len(indices)].copy_(indices)
            self._buffers[2].copy_(last_page_len)
        else:
            self._buffers = indptr.clone(), indices.clone(), last_page_len.clone()
        self._plan_of = plan
        self._int_workspace.view(torch.int64)[0] = plan.serial

    def _serial(self) -> int:
        self._library.num_plans += 1
        return self._library.num_plans

    def _attend(self, q: Tensor, pages: KVPages, qo_indptr: list[int], out: Tensor) -> Tensor:
        plan, buffers = self._plan_of, self._buffers
        assert plan is not None
        assert buffers is not None
        assert self._int_workspace.view(torch.int64)[0] == plan.serial, "another plan is there"
        k_cache, v_cache = pages
        assert q.dtype == out.dtype == plan.q_dtype
        assert k_cache.dtype == v_cache.dtype == plan.kv_dtype
        assert q.stride(-1) == 1
        assert out.is_contiguous()
        assert q.shape == out.shape == (qo_indptr[-1], plan.num_heads, plan.head_dim)
        shape = (plan.page_size, plan.num_kv_heads, plan.head_dim)
        assert k_cache.shape[1:] == v_cache.shape[1:] == shape
        indptr, indices, last_page_len = (each.tolist() for each in buffers)
        for row, (first, end) in enumerate(itertools.pairwise(qo_indptr)):
            ids = torch.tensor(indices[indptr[row] : indptr[row + 1]], device=q.device)
            num_keys = (len(ids) - 1) * plan.page_size + last_page_len[row]
            keys, values = (cache[ids].flatten(0, 1)[:num_keys] for cache in pages)
            out[first:end] = _attention(q[first:end], keys, values, plan)
        return out


class FakePrefill(_Wrapper):
    _qo_indptr: list[int]

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool,
        window_left: int,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
    ) -> None:
        assert qo_indptr.dtype is torch.int32
        assert qo_indptr.device.type == "cpu"
        assert len(qo_indptr) == len(paged_kv_indptr)
        self._qo_indptr = qo_indptr.tolist()
        heads = (num_qo_heads, num_kv_heads, head_dim_qk, page_size, window_left)
        dtypes = (q_data_type, kv_data_type)
        plan = _Plan(self._serial(), *heads, *dtypes, causal, len(qo_indptr) - 1)
        self._take(paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, plan)

    def run(self, q: Tensor, paged_kv_cache: KVPages, *, out: Tensor) -> Tensor:
        return self._attend(q, paged_kv_cache, self._qo_indptr, out)


class FakeDecode(_Wrapper):
    def __init__(
        self,
        library: FakeFlashInfer,
        workspace: Tensor,
        kv_layout: str,
        use_tensor_cores: bool,
        buffers: tuple[Tensor, Tensor, Tensor] | None,
    ) -> None:
        super().__init__(library, workspace, kv_layout)
        self._use_tensor_cores = use_tensor_cores
        self._is_fixed = buffers is not None
        self._buffers = buffers

    def plan(
        self,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        window_left: int,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
    ) -> None:
        assert self._use_tensor_cores or num_qo_heads // num_kv_heads in (1, 2, 3, 4, 6, 8, 16)
        heads = (num_qo_heads, num_kv_heads, head_dim, page_size, window_left)
        dtypes = (q_data_type, kv_data_type)
        plan = _Plan(self._serial(), *heads, *dtypes, False, len(last_page_len))
        self._take(indptr, indices, last_page_len, plan)

    def run(self, q: Tensor, paged_kv_cache: KVPages, *, out: Tensor) -> Tensor:
        assert self._plan_of is not None
        return self._attend(q, paged_kv_cache, list(range(self._plan_of.num_rows + 1)), out)

    def reset_workspace_buffer(
        self, float_workspace_buffer: Tensor, int_workspace_buffer: Tensor
    ) -> None:
        assert int_workspace_buffer.dtype is torch.uint8
        self._int_workspace = int_workspace_buffer[:8]


def _attention(q: Tensor, keys: Tensor, values: Tensor, plan: _Plan) -> Tensor:
    """q [n, heads, d], the last n of the keys' sequence; keys, values [S, kv_heads, d]"""
    group = plan.num_heads // plan.num_kv_heads
    k, v = (each.double().repeat_interleave(group, 1) for each in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) / plan.head_dim**0.5
    q_at = torch.arange(len(keys) - len(q), len(keys), device=q.device)[:, None]
    k_at = torch.arange(len(keys), device=q.device)
    hidden = (k_at > q_at) if plan.causal else torch.zeros_like(k_at > q_at)
    if plan.window_left >= 0:
        hidden |= k_at < q_at - plan.window_left
    probs = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", probs, v).to(q.dtype)
