"""Frames of the first layers leave before the last are computed."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvfabric.errors import TransferAborted
from kvfabric.frame_plan import plan_frames
from kvfabric.outgoing import LAST_PIECES
from tests.kvfabric.rig import (
    SHAPE,
    SLOT_NBYTES,
    Source,
    expected,
    open_nodes,
    random_kv,
    ship_all,
    ship_error,
    shipped,
    start_ship,
)


@given(st.integers(0, 40), st.integers(1, 80), st.sets(st.integers(1, 3)), st.integers(256, 9999))
def test_plans_of_groups_of_layers_cover_every_cell_once(
    first: int, count: int, inner: set[int], max_nbytes: int
) -> None:
    ends = [*sorted(inner), SHAPE.num_layers]
    times = np.zeros((SHAPE.num_layers, first + count), int)
    for begin, end in zip([0, *ends], ends, strict=False):
        for f in plan_frames(
            first,
            first + count,
            shape=SHAPE,
            block_size=16,
            max_nbytes=max_nbytes,
            layers=range(begin, end),
        ):
            assert 0 < SHAPE.frame_nbytes(f) <= max_nbytes
            assert begin <= f.first_layer < f.first_layer + f.num_layers <= end
            layers = slice(f.first_layer, f.first_layer + f.num_layers)
            times[layers, f.first_token : f.first_token + f.num_tokens] += 1
    assert (times[:, first:] == 1).all()
    assert (times[:, :first] == 0).all()


@pytest.mark.asyncio
async def test_first_layers_are_installed_before_the_last_are_told_of() -> None:
    async with open_nodes("inproc") as (prefill, decode):
        kv = random_kv(300)
        ticket, sink = expected(decode, 300, first_token=32)
        outgoing = start_ship(prefill, ticket, Source(kv))
        outgoing.extend(100)  # to 96, the last whole block
        await sink.has_installed(1)
        for num_layers in (2, 2, 3):
            outgoing.extend(300, num_layers)
        await sink.has_installed(1 + 2 + 1)
        assert np.array_equal(sink.kv[:3, :, 32:], kv[:3, :, 32:])
        assert not sink.kv[3, :, 96:].any()
        outgoing.extend(300)
        outgoing.commit(b"token 0")
        sent = await shipped(outgoing)
        await sink.commit()
        assert np.array_equal(sink.kv[:, :, 32:], kv[:, :, 32:])
        assert sent.nbytes == (300 - 32) * 1024


@pytest.mark.asyncio
async def test_what_nothing_hides_leaves_in_small_frames() -> None:
    async with open_nodes("inproc") as (prefill, decode):
        kv = random_kv(240)
        ticket, sink = expected(decode, 240)
        source = Source(kv)
        outgoing = start_ship(prefill, ticket, source)
        outgoing.extend(240, 3)
        outgoing.extend(240)
        outgoing.commit(b"token 0")
        await shipped(outgoing)
        await sink.commit()
        assert np.array_equal(sink.kv, kv)
    last = [f for f in source.packed if f.first_layer == 3]
    assert len(last) == LAST_PIECES
    assert max(map(SHAPE.frame_nbytes, last)) <= SLOT_NBYTES // LAST_PIECES
    assert len(source.packed) - len(last) == 3, "the others fill a slot"


@pytest.mark.asyncio
async def test_a_loss_between_layers_keeps_the_prefix_that_has_them_all() -> None:
    async with open_nodes("inproc") as (prefill, decode):
        ticket, sink = expected(decode, 300)
        outgoing = start_ship(prefill, ticket, Source(random_kv(300)))
        outgoing.extend(64)
        await sink.has_installed(1)
        outgoing.extend(300, 3)
        await sink.has_installed(2)
        outgoing.cancel()
        assert isinstance(await ship_error(outgoing), TransferAborted)
        error, num_tokens = await sink.loss()
        assert isinstance(error, TransferAborted)
        assert num_tokens == 64
        again, sink = expected(decode, 300, first_token=64)
        kv = random_kv(300, seed=1)
        await shipped(ship_all(prefill, again, Source(kv)))
        await sink.commit()
        assert np.array_equal(sink.kv[:, :, 64:], kv[:, :, 64:])
