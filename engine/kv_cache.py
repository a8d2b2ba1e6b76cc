"""The KV pool's tensor: written by the model, read and filled by copies from and to the wire.

Knows slots and blocks, not who owns them. One tensor per engine:

    data  [layers, 2, num_blocks, block_size, kv_heads, head_dim]     (2: K, V)
          (and perhaps a scratch block behind them)

A payload is layout-neutral, [layers, 2, tokens, heads, head_dim], contiguous, in the model's
dtype, and covers a `KVRange` of one sequence. Whole blocks move by one indexed copy per layer,
straight between the pool and the payload; the partial blocks at both ends by one strided copy
each. On CUDA the payload is pinned host memory and every call is asynchronous on the current
stream; its device-side temporary belongs to that stream.
"""

import math
import mmap
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.config import ModelConfig
from engine.host_copy import copy_to_device


class KVRange(Protocol):
    """Which part of one sequence's KV: half-open ranges by first and count."""

    @property
    def first_token(self) -> int: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def first_layer(self) -> int: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def first_head(self) -> int: ...
    @property
    def num_heads(self) -> int: ...


class KVCache:
    """See the module. The engine thread writes; a copier thread gathers and scatters beside it,
    never the same slots at once (its `KVLease` sees to that)."""

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        has_scratch: bool = False,
    ) -> None:
        """`has_scratch`: there is a `scratch_block`."""
        self.num_blocks = num_blocks
        self.block_size = block_size
        size = num_blocks + has_scratch
        shape = (config.num_layers, 2, size, block_size, config.num_kv_heads, config.head_dim)
        self.data = _zeros(shape, dtype, device)  # no slot holds a NaN
        self.device = self.data.device

    @property
    def scratch_block(self) -> int:
        """One more, which no block pool knows; rows that only fill a step up write to it."""
        assert self.data.shape[2] > self.num_blocks, "made without one"
        return self.num_blocks

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """K and V of a layer, each [num_blocks, block_size, kv_heads, head_dim]."""
        return self.data[layer, 0], self.data[layer, 1]

    def write(self, layer: int, k: Tensor, v: Tensor, slot_mapping: Tensor) -> None:
        """k, v [T, kv_heads, head_dim] into slots slot_mapping [T] of the layer."""
        slots = self.data[layer].flatten(1, 2)  # [2, num_blocks * block_size, kv_heads, head_dim]
        slots[0].index_copy_(0, slot_mapping, k)
        slots[1].index_copy_(0, slot_mapping, v)

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Whole blocks (source, target) within the pool; targets differ, and none is a source."""
        ids = np.array(copies, dtype=np.int64)  # [n, 2]
        sources, targets = copy_to_device((ids[:, 0], ids[:, 1]), self.device).device
        self.data.index_copy_(2, targets, self.data.index_select(2, sources))

    def payload_nbytes(self, part: KVRange) -> int:
        heads = part.num_heads * self.data.shape[-1] * self.data.itemsize
        return part.num_layers * 2 * part.num_tokens * heads

    def gather(self, block_table: Sequence[int], part: KVRange, out: Tensor) -> None:
        """Copies the range out of the pool; `out` is uint8 [payload_nbytes(part)]."""
        payload = self._payload(part, out)
        staged = self._on_device(payload)
        pool = self._pool(part)
        for tokens, blocks, slots in self._pieces(block_table, part):
            into = staged[:, tokens]
            if isinstance(blocks, int):
                _copy(pool[:, blocks, slots], into)
            else:
                _take_blocks(pool, blocks, into)
        if staged is not payload:
            payload.copy_(staged, non_blocking=True)

    def scatter(
        self, block_table: Sequence[int], part: KVRange, payload: Tensor, skip: int = 0
    ) -> None:
        """Copies a range into the pool, but for its first `skip` tokens; `payload` is uint8
        [payload_nbytes(part)]."""
        typed = self._payload(part, payload)[:, skip:]
        staged = self._on_device(typed)
        if staged is not typed:
            staged.copy_(typed, non_blocking=True)
        pool = self._pool(part)
        for tokens, blocks, slots in self._pieces(block_table, part, skip):
            source = staged[:, tokens]
            if isinstance(blocks, int):
                _copy(source, pool[:, blocks, slots])
            else:
                _put_blocks(pool, blocks, source)

    def _payload(self, part: KVRange, raw: Tensor) -> Tensor:
        """raw bytes → [layers * 2, tokens, heads, head_dim]"""
        assert raw.numel() == self.payload_nbytes(part), "the range says how long its payload is"
        shape = (part.num_layers * 2, part.num_tokens, part.num_heads, self.data.shape[-1])
        return raw.view(self.data.dtype).view(shape)

    def _on_device(self, payload: Tensor) -> Tensor:
        """The payload itself, or room for it beside the pool."""
        if payload.device == self.device:
            return payload
        return torch.empty_like(payload, device=self.device)

    def _pool(self, part: KVRange) -> Tensor:
        """The range as planes, [layers * 2, num_blocks, block_size, heads, head_dim], a view."""
        layers = self.data.narrow(0, part.first_layer, part.num_layers)
        return layers.flatten(0, 1).narrow(3, part.first_head, part.num_heads)

    def _pieces(
        self, block_table: Sequence[int], part: KVRange, skip: int = 0
    ) -> list[tuple[slice, Tensor | int, slice]]:
        """Cuts a token range at block boundaries: (tokens after `skip`, blocks, slots in them).
        Partial blocks come as one id each, all whole blocks together as ids [n]."""
        size = self.block_size
        first, end = part.first_token + skip, part.first_token + part.num_tokens
        whole_first, whole_end = -(-first // size), end // size  # block indices
        if whole_first > whole_end:  # inside one block
            return [self._partial(block_table, first, first, end)]
        pieces: list[tuple[slice, Tensor | int, slice]] = []
        if first < whole_first * size:
            pieces.append(self._partial(block_table, first, first, whole_first * size))
        if whole_first < whole_end:
            whole = np.array(block_table[whole_first:whole_end], dtype=np.int64)
            (ids,) = copy_to_device((whole,), self.device).device
            tokens = slice(whole_first * size - first, whole_end * size - first)
            pieces.append((tokens, ids, slice(None)))
        if whole_end * size < end:
            pieces.append(self._partial(block_table, first, whole_end * size, end))
        return pieces

    def _partial(
        self, block_table: Sequence[int], payload_first: int, begin: int, end: int
    ) -> tuple[slice, int, slice]:
        """Positions [begin, end) of one block."""
        block, offset = divmod(begin, self.block_size)
        tokens = slice(begin - payload_first, end - payload_first)
        return tokens, block_table[block], slice(offset, offset + end - begin)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # NumPy asks for huge pages: attention reads all over the pool. They come zeroed; touching each
    # has them there before the first step, four times as fast as writing all of it.
    raw = np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)
    raw[:: mmap.PAGESIZE] = 0
    return torch.from_numpy(raw).view(dtype).view(shape)


# On the CPU NumPy copies: a block by one memcpy, without the GIL, and, as torch would not, on no
# thread but the caller's. One call for all planes: a call for each takes as long as the copy.


def _copy(source: Tensor, into: Tensor) -> None:
    if into.is_cuda:
        into.copy_(source)
    else:
        _bytes(into)[...] = _bytes(source)


def _take_blocks(pool: Tensor, blocks: Tensor, into: Tensor) -> None:
    """Blocks [n] of each plane of the pool into [planes, n * block_size, heads, head_dim]."""
    if pool.is_cuda:
        for plane, whole in zip(pool.unbind(), into.unbind(), strict=True):
            torch.index_select(plane, 0, blocks, out=whole.view(-1, *plane.shape[1:]))
        return
    slots, tokens = _bytes(pool), _bytes(into)
    planes, ids = _each_plane(slots, blocks)
    if slots.flags.c_contiguous and tokens.flags.c_contiguous:
        rows = slots.reshape(len(slots) * slots.shape[1], -1)  # [planes * num_blocks, nbytes]
        out = tokens.reshape(len(slots), len(ids), -1)
        np.take(rows, planes * slots.shape[1] + ids, axis=0, out=out, mode="clip")
    else:  # some of the heads, or beside a partial block: through a copy of its own
        _as_blocks(tokens, slots)[...] = slots[planes, ids]


def _put_blocks(pool: Tensor, blocks: Tensor, tokens: Tensor) -> None:
    """[planes, n * block_size, heads, head_dim] into blocks [n] of each plane of the pool."""
    if pool.is_cuda:
        for plane, whole in zip(pool.unbind(), tokens.unbind(), strict=True):
            plane.index_copy_(0, blocks, whole.view(-1, *plane.shape[1:]))
        return
    slots = _bytes(pool)
    slots[_each_plane(slots, blocks)] = _as_blocks(_bytes(tokens), slots)


_Ids = npt.NDArray[np.int64]
_Bytes = npt.NDArray[np.uint8]


def _each_plane(slots: _Bytes, blocks: Tensor) -> tuple[_Ids, _Ids]:
    """Indices of the blocks [n] of all planes of slots [planes, num_blocks, ...]: together
    [planes, n]."""
    return np.arange(len(slots))[:, None], blocks.numpy()  # host memory


def _as_blocks(tokens: _Bytes, slots: _Bytes) -> _Bytes:
    """[planes, n * block_size, heads, head_nbytes] → [planes, n, block_size, heads, head_nbytes],
    a view."""
    return tokens.reshape(len(slots), -1, *slots.shape[2:])


def _bytes(tensor: Tensor) -> _Bytes:
    """The tensor's own memory: [..., head_dim] → [..., head_nbytes]"""
    view: _Bytes = tensor.view(torch.uint8).numpy()  # host memory
    return view
