import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvfabric.errors import BadFrame
from kvfabric.frame import (
    HEADER_NBYTES,
    FrameHeader,
    FrameKind,
    FrameRange,
    TransferId,
    message_nbytes,
    payload_view,
    read_frame,
    write_frame,
)

U16, U32, U64 = (1 << 16) - 1, (1 << 32) - 1, (1 << 64) - 1

ranges = st.builds(
    FrameRange,
    st.integers(0, U32), st.integers(0, U32), st.integers(0, U16),
    st.integers(0, U16), st.integers(0, U16), st.integers(0, U16),
)  # fmt: skip


@st.composite
def frames(draw: st.DrawFn) -> tuple[FrameHeader, bytes]:
    payload = draw(st.binary(max_size=200))
    header = FrameHeader(
        kind=draw(st.sampled_from(FrameKind)),
        transfer_id=TransferId(draw(st.binary(min_size=16, max_size=16))),
        sequence=draw(st.integers(0, U32)),
        range=draw(ranges),
        nbytes=len(payload),
        checksum=draw(st.none() | st.integers(0, U64)),
        codec=draw(st.integers(0, 255)),
    )
    return header, payload


def written(header: FrameHeader, payload: bytes, spare: int = 0) -> memoryview:
    message = memoryview(bytearray(message_nbytes(len(payload)) + spare))
    payload_view(message, len(payload))[:] = payload
    assert len(write_frame(header, message)) == message_nbytes(len(payload))
    return message


@given(frames(), st.integers(0, 100))
def test_a_frame_reads_as_written(frame: tuple[FrameHeader, bytes], spare: int) -> None:
    header, payload = frame
    message = written(header, payload, spare)
    assert read_frame(message) == header
    assert payload_view(message, header.nbytes) == payload


@given(frames(), st.data())
def test_a_frame_cut_short_is_noticed_in_a_used_slot(
    frame: tuple[FrameHeader, bytes], data: st.DataObject
) -> None:
    header, payload = frame
    message = written(header, payload)
    slot = memoryview(bytearray(b"\xaa" * len(message)))
    came = data.draw(st.integers(0, len(message) - 8))
    slot[:came] = message[:came]
    with pytest.raises(BadFrame):
        read_frame(slot)


@given(frames(), st.data())
def test_a_flipped_header_bit_is_noticed(
    frame: tuple[FrameHeader, bytes], data: st.DataObject
) -> None:
    message = written(*frame)
    message[data.draw(st.integers(0, HEADER_NBYTES - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(BadFrame):
        read_frame(message)


@given(st.binary(max_size=300))
def test_junk_is_a_bad_frame(junk: bytes) -> None:
    with pytest.raises(BadFrame):
        read_frame(memoryview(junk))


def test_a_size_beyond_the_slot_is_a_bad_frame() -> None:
    header = FrameHeader(FrameKind.KV, TransferId(bytes(16)), 0, FrameRange(0, 1, 0, 1, 0, 1), 9, 1)
    with pytest.raises(BadFrame, match="does not fit"):
        read_frame(written(header, b"123456789")[:-1])
