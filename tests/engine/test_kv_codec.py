"""Codecs: lossless is lossless, lossy is within its bound, and nonsense is refused."""

import numpy as np
import pytest
import torch
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.kv_codec import BadPayload, Codec, decode, encode

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
HEAD_DIM = 32


def raw_kv(num_rows: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Rows as KV has them: each head and token of its own size."""
    generator = torch.Generator().manual_seed(seed)
    scales = torch.rand(num_rows, 1, generator=generator) * 8
    values = torch.randn(num_rows, HEAD_DIM, generator=generator) * scales
    return values.to(dtype).view(torch.uint8).flatten()


def round_trip(codec: Codec, raw: Tensor, dtype: torch.dtype) -> tuple[Tensor, int] | None:
    out = torch.empty(len(raw), dtype=torch.uint8)
    nbytes = encode(codec, raw, dtype, HEAD_DIM, out)
    if nbytes is None:
        return None
    back = torch.zeros_like(raw)
    decode(codec, out[:nbytes].clone(), dtype, HEAD_DIM, back)
    return back, nbytes


@pytest.mark.parametrize("dtype", DTYPES)
def test_planes_are_lossless_and_smaller(dtype: torch.dtype) -> None:
    raw = raw_kv(400, dtype)
    coded = round_trip(Codec.PLANES, raw, dtype)
    assert coded is not None
    assert torch.equal(coded[0], raw)
    assert coded[1] < (0.8 if dtype is torch.bfloat16 else 0.9) * len(raw)


@pytest.mark.parametrize("dtype", DTYPES)
def test_int8_is_off_by_half_a_step_at_most(dtype: torch.dtype) -> None:
    raw = raw_kv(400, dtype)
    coded = round_trip(Codec.INT8, raw, dtype)
    assert coded is not None
    assert coded[1] == 400 * (HEAD_DIM + 4)
    rows, back = (bytes_.view(dtype).view(-1, HEAD_DIM).float() for bytes_ in (raw, coded[0]))
    steps = rows.abs().amax(1, keepdim=True) / 127
    rounding = rows.abs() * torch.finfo(dtype).eps  # of the result, to its dtype
    assert ((rows - back).abs() <= steps * 0.5001 + rounding).all()


def test_rows_of_zeros_stay_zeros() -> None:
    raw = torch.zeros(64 * HEAD_DIM * 2, dtype=torch.uint8)
    coded = round_trip(Codec.INT8, raw, torch.bfloat16)
    assert coded is not None
    assert torch.equal(coded[0], raw)


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_what_int8_cannot_say_is_sent_raw(value: float) -> None:
    raw = raw_kv(16, torch.bfloat16)
    raw.view(torch.bfloat16)[5] = value
    assert round_trip(Codec.INT8, raw, torch.bfloat16) is None


def test_noise_is_sent_raw() -> None:
    noise = torch.from_numpy(np.random.default_rng(1).integers(0, 256, 8192, np.uint8))
    assert round_trip(Codec.PLANES, noise, torch.bfloat16) is None


@settings(max_examples=200, deadline=None)
@given(st.sampled_from([Codec.INT8, Codec.PLANES]), st.binary(max_size=400), st.data())
def test_hostile_payloads_are_refused_or_decoded_never_worse(
    codec: Codec, junk: bytes, data: st.DataObject
) -> None:
    raw = raw_kv(4, torch.bfloat16)
    out = torch.zeros(len(raw) + 64, dtype=torch.uint8)
    nbytes = encode(codec, raw, torch.bfloat16, HEAD_DIM, out) or 0
    good = bytes(out[:nbytes].numpy())
    cut = data.draw(st.integers(0, len(good)))
    encoded = torch.frombuffer(bytearray(good[:cut] + junk + b"\0"), dtype=torch.uint8)[:-1]
    back = torch.zeros_like(raw)
    try:
        decode(codec, encoded, torch.bfloat16, HEAD_DIM, back)
    except BadPayload:
        return
    assert len(encoded) <= len(raw) + 64


def test_a_bomb_is_refused_before_it_grows() -> None:
    bomb = zstandard.ZstdCompressor().compress(bytes(1 << 30))
    encoded = np.array(len(bomb), "<u4").tobytes() + bomb + bytes(64)
    payload = torch.frombuffer(bytearray(encoded), dtype=torch.uint8)
    with pytest.raises(BadPayload, match="64 values"):
        decode(Codec.PLANES, payload, torch.bfloat16, HEAD_DIM, torch.zeros(128, dtype=torch.uint8))
