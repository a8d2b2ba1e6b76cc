"""Codecs of KV on the wire: fewer bytes for a link that is slow, at the price of encoding.

A payload is rows of `head_dim` values: one head's K or V of one token each. Knows no frames and no
links; whether a codec pays is decided elsewhere (engine.codec_choice.py).

* INT8: each row by its own scale, symmetric: `| scales, float32 [rows] | int8 [rows, head_dim] |`.
  Lossy: a value is off by at most half a 127th of the largest of its row.
* PLANES: lossless. The byte of each value that holds its exponent is compressed by zstd, for it
  has some 3 bits of entropy; the others are noise and stay: `| size, uint32 | zstd | the rest |`.
  SmolLM2's KV in bfloat16 shrinks to 0.68.
"""

import time
from enum import IntEnum

import numpy as np
import numpy.typing as npt
import torch
import zstandard
from torch import Tensor

from engine.codec_choice import CodecCost, CodecPolicy


class Codec(IntEnum):
    """Ids on the wire."""

    RAW = 0
    INT8 = 1
    PLANES = 2


class BadPayload(Exception):
    """An encoded payload that is not what its codec makes of any rows of this size."""


_ZSTD_LEVEL = 1
"""Measured on the exponents of real KV: 0.37 at 350 MB/s; 3 is slower and larger."""
_SIZE = np.dtype("<u4")
_PROBE_NBYTES = 1 << 20


def encode(codec: Codec, raw: Tensor, dtype: torch.dtype, head_dim: int, out: Tensor) -> int | None:
    """The bytes written to `out`; None: this payload gains nothing by it, send it raw.

    raw, uint8 [rows * head_dim * itemsize], lies on any device for INT8, on the host for PLANES;
    `out`, uint8 on the host (pinned, for a copy from a device), is as large as `raw` or larger.
    """
    assert codec is not Codec.RAW
    if codec is Codec.INT8:
        return _encode_int8(raw.view(dtype).view(-1, head_dim), out)
    return _encode_planes(raw, dtype.itemsize, out)


def decode(codec: Codec, encoded: Tensor, dtype: torch.dtype, head_dim: int, raw: Tensor) -> None:
    """Fills `raw` from what `encode` wrote. Raises BadPayload: it may come from anybody."""
    assert codec is not Codec.RAW
    if codec is Codec.INT8:
        _decode_int8(encoded, raw.view(dtype).view(-1, head_dim))
    else:
        _decode_planes(encoded, dtype.itemsize, raw)


def measured(dtype: torch.dtype, head_dim: int) -> CodecPolicy:
    """What the codecs cost on this machine, by one payload of a megabyte like KV; some 20 ms. Real
    frames correct it."""
    rows = torch.randn(_PROBE_NBYTES // (head_dim * dtype.itemsize), head_dim)
    scales = torch.exp(torch.randn(len(rows), 1, generator=torch.Generator().manual_seed(1)))
    raw = (rows * scales).to(dtype).view(torch.uint8).flatten()
    costs = {int(codec): _probe(codec, raw, dtype, head_dim) for codec in Codec if codec}
    return CodecPolicy(costs)


def _probe(codec: Codec, raw: Tensor, dtype: torch.dtype, head_dim: int) -> CodecCost:
    out, back = torch.empty_like(raw), torch.empty_like(raw)
    encode(codec, raw, dtype, head_dim, out)  # the first time touches memory and code
    began = time.perf_counter()
    nbytes = encode(codec, raw, dtype, head_dim, out)
    encoded = time.perf_counter()
    if nbytes is not None:
        decode(codec, out[:nbytes], dtype, head_dim, back)
    decoded = time.perf_counter()
    ratio = (nbytes or len(raw)) / len(raw)
    return CodecCost(ratio, (encoded - began) / len(raw), (decoded - encoded) / len(raw))


def _encode_int8(rows: Tensor, out: Tensor) -> int | None:
    """rows [n, head_dim]"""
    values = rows.float()
    scales = values.abs().amax(dim=1).div_(127.0)  # [n]
    if not bool(torch.isfinite(scales).all()):  # sync point, on a device
        return None
    steps = values.mul(torch.where(scales > 0, scales.reciprocal(), 0.0).unsqueeze(1))
    packed = steps.round_().clamp_(-127, 127).to(torch.int8)
    scales_nbytes, nbytes = 4 * len(rows), 4 * len(rows) + rows.numel()
    if nbytes >= rows.numel() * rows.itemsize:
        return None
    out[:scales_nbytes].view(torch.float32).copy_(scales)
    out[scales_nbytes:nbytes].view(torch.int8).copy_(packed.flatten())
    return nbytes


def _decode_int8(encoded: Tensor, rows: Tensor) -> None:
    scales_nbytes = 4 * len(rows)
    if len(encoded) != scales_nbytes + rows.numel():
        raise BadPayload(f"{len(encoded)} bytes for {len(rows)} rows of {rows.shape[1]}")
    scales = encoded[:scales_nbytes].view(torch.float32).to(rows.device).unsqueeze(1)
    steps = encoded[scales_nbytes:].view(torch.int8).view(rows.shape).to(rows.device)
    rows.copy_(steps.float().mul_(scales))


def _encode_planes(raw: Tensor, itemsize: int, out: Tensor) -> int | None:
    values = _bytes(raw).reshape(-1, itemsize)  # little endian: the exponent is in the last byte
    exponents = np.ascontiguousarray(values[:, -1])
    packed = zstandard.ZstdCompressor(level=_ZSTD_LEVEL).compress(exponents.data)
    rest_at = _SIZE.itemsize + len(packed)
    nbytes = rest_at + values[:, :-1].size
    if nbytes >= raw.numel():
        return None
    target = _bytes(out)
    target[: _SIZE.itemsize] = np.frombuffer(np.array(len(packed), _SIZE).tobytes(), np.uint8)
    target[_SIZE.itemsize : rest_at] = np.frombuffer(packed, np.uint8)
    target[rest_at:nbytes].reshape(-1, itemsize - 1)[...] = values[:, :-1]
    return nbytes


def _decode_planes(encoded: Tensor, itemsize: int, raw: Tensor) -> None:
    source, values = _bytes(encoded), _bytes(raw).reshape(-1, itemsize)
    num_values = len(values)
    packed_nbytes = int(source[: _SIZE.itemsize].view(_SIZE)[0]) if len(source) >= 4 else 0
    rest_at = _SIZE.itemsize + packed_nbytes
    if len(source) != rest_at + num_values * (itemsize - 1):
        raise BadPayload(f"{len(source)} bytes for {num_values} values, {packed_nbytes} packed")
    exponents = _unpack(source[_SIZE.itemsize : rest_at], num_values)
    values[:, -1] = exponents
    values[:, :-1] = source[rest_at:].reshape(-1, itemsize - 1)


def _unpack(packed: npt.NDArray[np.uint8], nbytes: int) -> npt.NDArray[np.uint8]:
    """Looks at the size a frame claims before anything is allocated for it."""
    try:
        if zstandard.get_frame_parameters(packed.data).content_size != nbytes:
            raise BadPayload(f"the exponents are not those of {nbytes} values")
        return np.frombuffer(zstandard.ZstdDecompressor().decompress(packed.data), np.uint8)
    except zstandard.ZstdError as error:
        raise BadPayload(f"the exponents cannot be unpacked: {error}") from error


def _bytes(tensor: Tensor) -> npt.NDArray[np.uint8]:
    view: npt.NDArray[np.uint8] = tensor.numpy()  # host memory
    return view
