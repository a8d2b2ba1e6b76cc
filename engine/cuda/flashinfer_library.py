"""What we use of FlashInfer (0.7): its paged wrappers' shapes, where it can run, and how it is
found. The only module that imports it.

A wrapper has two halves. `plan` takes a step's lengths on the host, cuts the work into pieces of
equal size and queues a copy of that to the device; `run`, once a layer, launches kernels and looks
at nothing on the host. Pages are in layout NHD: [num_blocks, block_size, kv_heads, head_dim], K and
V apart, as `KVCache.layer` has them.
"""

import importlib
import importlib.util
from typing import Protocol, cast

import torch
from torch import Tensor

from engine.config import ModelConfig

WORKSPACE_NBYTES = 256 << 20
"""Partial results of sequences that are cut into several pieces; twice what FlashInfer asks for,
and shared by all wrappers of a device: their kernels run one after the other."""
INT_WORKSPACE_NBYTES = 8 << 20
"""A plan on the device: FlashInfer's own size."""

KVPages = tuple[Tensor, Tensor]


class PrefillWrapper(Protocol):
    """Rows of any number of new tokens. All index tensors are int32."""

    def plan(
        self,
        qo_indptr: Tensor,  # [R + 1] host
        paged_kv_indptr: Tensor,  # [R + 1] host
        paged_kv_indices: Tensor,  # [paged_kv_indptr[R]] device
        paged_kv_last_page_len: Tensor,  # [R] host
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool,
        window_left: int,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
    ) -> None: ...

    def run(self, q: Tensor, paged_kv_cache: KVPages, *, out: Tensor) -> Tensor: ...


class DecodeWrapper(Protocol):
    """Rows of one new token."""

    def plan(
        self,
        indptr: Tensor,  # [R + 1] host
        indices: Tensor,  # [indptr[R]] device
        last_page_len: Tensor,  # [R] host
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        window_left: int,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
    ) -> None: ...

    def run(self, q: Tensor, paged_kv_cache: KVPages, *, out: Tensor) -> Tensor: ...

    def reset_workspace_buffer(
        self, float_workspace_buffer: Tensor, int_workspace_buffer: Tensor
    ) -> None: ...


class Library(Protocol):
    """The module `flashinfer`."""

    def BatchPrefillWithPagedKVCacheWrapper(
        self, float_workspace_buffer: Tensor, kv_layout: str, *, backend: str
    ) -> PrefillWrapper: ...

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
    ) -> DecodeWrapper: ...


def unsupported(model: ModelConfig, dtype: torch.dtype) -> str:
    """Why FlashInfer cannot run this model; empty if it may, on a card that it knows."""
    if importlib.util.find_spec("flashinfer") is None:
        return "FlashInfer is not installed"
    if dtype not in (torch.float16, torch.bfloat16):
        return f"FlashInfer knows no {dtype}"
    if model.head_dim not in (64, 128, 256):
        return f"head_dim is {model.head_dim}; FlashInfer's are 64, 128 and 256"
    return ""


def load() -> Library:
    """Raises ImportError."""
    return cast(Library, importlib.import_module("flashinfer"))


def use_tensor_cores(num_heads: int, num_kv_heads: int) -> bool:
    """In decode. From four query heads a KV head on, products of matrices pay; below, vectors are
    as fast, for decode waits for memory. The vector kernel knows few group sizes, none of them
    both small and odd but 1 and 3."""
    return num_heads // num_kv_heads >= 4


def window_left(window: int | None) -> int:
    """Ours counts the token itself, FlashInfer's those before it; -1: all of them."""
    return -1 if window is None else window - 1
