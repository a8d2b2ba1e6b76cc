import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvfabric.frame import FrameRange
from kvfabric.frame_plan import max_frame_tokens, plan_frames
from kvfabric.ticket import KVShape

shapes = st.builds(KVShape, st.integers(1, 9), st.integers(1, 4), st.integers(1, 8))


@st.composite
def requests(draw: st.DrawFn) -> tuple[KVShape, int, int, int, int]:
    shape = draw(shapes)
    first = draw(st.integers(0, 40))
    end = first + draw(st.integers(0, 80))
    line = shape.frame_nbytes(FrameRange(0, 1, 0, 1, 0, shape.num_heads))
    return shape, first, end, draw(st.integers(1, 16)), draw(st.integers(line, line * 400))


@given(requests())
def test_a_plan_covers_every_cell_once_and_fits(
    request_: tuple[KVShape, int, int, int, int],
) -> None:
    shape, first, end, block_size, max_nbytes = request_
    plan = plan_frames(first, end, shape=shape, block_size=block_size, max_nbytes=max_nbytes)
    times = np.zeros((shape.num_layers, end, shape.num_heads), int)
    for f in plan:
        assert 0 < shape.frame_nbytes(f) <= max_nbytes
        times[
            f.first_layer : f.first_layer + f.num_layers,
            f.first_token : f.first_token + f.num_tokens,
            f.first_head : f.first_head + f.num_heads,
        ] += 1
    assert (times[:, first:] == 1).all()
    assert (times[:, :first] == 0).all()


@given(requests())
def test_cuts_lie_on_blocks_unless_a_line_of_one_block_is_too_long(
    request_: tuple[KVShape, int, int, int, int],
) -> None:
    shape, first, end, block_size, max_nbytes = request_
    plan = plan_frames(first, end, shape=shape, block_size=block_size, max_nbytes=max_nbytes)
    if max_frame_tokens(shape, max_nbytes) >= block_size:
        ends = {f.first_token + f.num_tokens for f in plan} - {end}
        assert all(token % block_size == 0 for token in ends)
    if max_frame_tokens(shape, max_nbytes) >= block_size * shape.num_layers:
        assert all(f.num_layers == shape.num_layers for f in plan)


def test_layers_are_split_before_tokens() -> None:
    shape = KVShape(num_layers=8, num_heads=1, head_nbytes=1)  # 2 bytes per token and layer
    plan = plan_frames(0, 32, shape=shape, block_size=16, max_nbytes=16 * 2 * 3)
    assert {f.num_tokens for f in plan} == {16}
    assert [f.num_layers for f in plan] == [2, 3, 3] * 2


def test_pieces_are_even() -> None:
    shape = KVShape(num_layers=2, num_heads=1, head_nbytes=1)
    plan = plan_frames(0, 12 * 16, shape=shape, block_size=16, max_nbytes=2 * 2 * 16 * 11)
    assert [f.num_tokens for f in plan] == [96, 96]


def test_no_tokens_no_frames() -> None:
    assert plan_frames(5, 5, shape=KVShape(1, 1, 1), block_size=4, max_nbytes=100) == []


def test_kv_that_fits_no_slot_is_our_bug() -> None:
    with pytest.raises(AssertionError):
        plan_frames(0, 1, shape=KVShape(1, 1, 64), block_size=4, max_nbytes=127)
