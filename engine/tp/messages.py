"""What the payloads of a step channel hold (engine/tp/channel.py), to bytes and back. Pure."""

import struct
from collections.abc import Sequence
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt
import torch

from engine.batch import PackedBatch

_BATCH = struct.Struct("<5I4x")  # what follows is aligned
_ROWS = struct.Struct("<2I")
_SWAP = struct.Struct("<3Q")
_SWAPPED = struct.Struct("<Qq")
_LOADED = struct.Struct("<32sQQ")


def pack_batch(batch: PackedBatch) -> tuple[bytes, memoryview]:
    """For FORWARD."""
    counts = (batch.num_rows, batch.num_tokens, batch.max_blocks)
    header = _BATCH.pack(*counts, batch.num_logits, batch.num_prompts)
    return header, batch.host.numpy().data.cast("B")  # host memory


def read_batch(payload: bytearray, pinned: bool) -> PackedBatch:
    words = np.frombuffer(payload, dtype=np.int64, offset=_BATCH.size)
    host = torch.from_numpy(words)
    if pinned:
        host = host.pin_memory()
    return PackedBatch(host, *_BATCH.unpack_from(payload))


def pack_rows(rows: slice) -> bytes:
    """For PROMPT_LOGITS: rows of `BatchInput.prompt_indices`."""
    return _ROWS.pack(rows.start, rows.stop)


def read_rows(payload: bytearray) -> slice:
    return slice(*_ROWS.unpack(payload))


def pack_ids(ids: npt.ArrayLike) -> bytes:
    """Block ids, or pairs of them."""
    return np.asarray(ids, dtype=np.int64).tobytes()


def read_ids(payload: bytearray, offset: int = 0) -> list[int]:
    ids: list[int] = np.frombuffer(payload, dtype=np.int64, offset=offset).tolist()  # host memory
    return ids


class SwapOrder(NamedTuple):
    """SWAP_OUT and SWAP_IN: tokens [first_token, num_tokens) of a sequence, and its blocks."""

    serial: int
    first_token: int
    num_tokens: int
    block_ids: Sequence[int]

    def pack(self) -> bytes:
        return _SWAP.pack(*self[:3]) + pack_ids(self.block_ids)

    @classmethod
    def read(cls, payload: bytearray) -> Self:
        serial, first_token, num_tokens = _SWAP.unpack_from(payload)
        return cls(serial, first_token, num_tokens, read_ids(payload, _SWAP.size))


class Swapped(NamedTuple):
    """SWAPPED: a copy is over. `ns` is negative if it failed."""

    serial: int
    ns: int

    def pack(self) -> bytes:
        return _SWAPPED.pack(*self)

    @classmethod
    def read(cls, payload: bytearray) -> Self:
        return cls(*_SWAPPED.unpack(payload))


class Loaded(NamedTuple):
    """LOADED: what a rank says of itself when it could join."""

    digest: bytes
    """Of the whole model's weights."""
    num_blocks: int
    pool_nbytes: int

    def pack(self) -> bytes:
        return _LOADED.pack(*self)

    @classmethod
    def read(cls, payload: bytearray) -> Self:
        return cls(*_LOADED.unpack(payload))
