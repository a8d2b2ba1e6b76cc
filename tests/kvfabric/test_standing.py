"""Receives that stand ready: only on busy connections, and never in anybody's way."""

import asyncio

import numpy as np
import pytest

from kvfabric.control import Offer
from kvfabric.node import Node
from kvfabric.standing import LINGER_S, NUM_FRAMES, Standing
from tests.kvfabric.rig import Source, expected, idle, open_nodes, random_kv, ship_all, shipped
from tests.kvfabric.wire_tap import WireTap, wire_tap

SHORT = 64  # tokens; a frame


def test_they_stand_behind_transfers_that_follow_each_other_closely() -> None:
    standing = Standing()
    standing.began(1.0)
    standing.ended(1.1)
    assert standing.num_frames(1.1) == 0, "one alone"
    standing.began(1.1 + LINGER_S / 2)
    assert standing.num_frames(1.2) == 0
    standing.ended(1.4)
    assert standing.num_frames(1.4) == standing.num_frames(1.39 + LINGER_S) == NUM_FRAMES
    assert standing.num_frames(1.4 + LINGER_S) == 0, "nothing came"
    standing.began(1.4 + LINGER_S)
    standing.ended(9.0)
    assert standing.num_frames(9.0) == 0, "it began too late"


@pytest.mark.parametrize("by_pace", [False, True])
def test_who_wants_none_has_none(by_pace: bool) -> None:
    standing = Standing()
    for now_s in (1.0, 1.01):
        standing.began(now_s)
        standing.ended(now_s)
    assert standing.num_frames(1.02) == NUM_FRAMES
    if by_pace:
        standing.paced(True)
    else:
        standing.recalled()
    assert standing.num_frames(1.02) == 0
    standing.began(1.03)
    standing.ended(1.03)
    assert standing.num_frames(1.04) == (0 if by_pace else NUM_FRAMES)


async def one_after_the_other(sender: Node, receiver: Node, count: int) -> None:
    for seed in range(count):
        kv = random_kv(SHORT, seed)
        ticket, sink = expected(receiver, SHORT)
        await shipped(ship_all(sender, ticket, Source(kv)))
        await sink.commit()
        assert np.array_equal(sink.kv, kv)


def offered(tap: WireTap) -> int:
    return sum(one.what.num_frames for one in tap.posted if isinstance(one.what, Offer))


@pytest.mark.asyncio
async def test_what_stands_is_used_and_given_back_in_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with wire_tap(monkeypatch) as tap:
        async with open_nodes("inproc", recv_slots=8) as (prefill, decode):
            await one_after_the_other(prefill, decode, 6)
            await asyncio.sleep(LINGER_S / 5)
            assert decode.stats().recv_slots_used == NUM_FRAMES
            await idle(decode)
            voids = sum(one.kind == "VOID" for one in tap.posted)
            assert voids == NUM_FRAMES
            assert offered(tap) == 6 * 2 + voids, "one message for each frame on offer"
            tap.posted.clear()
            await asyncio.sleep(LINGER_S)
            await one_after_the_other(prefill, decode, 1)
            assert offered(tap) == 2, "it is not busy any more"


@pytest.mark.asyncio
async def test_a_slot_in_which_nothing_is_to_come_is_given_to_who_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each peer may have half of the slots, so two that are idle could have all."""
    monkeypatch.setattr("kvfabric.standing.LINGER_S", 30.0)
    monkeypatch.setattr("kvfabric.link.LINGER_S", 30.0)
    async with open_nodes("inproc", count=4, recv_slots=6) as (one, two, three, decode):
        for sender in (one, two):
            await one_after_the_other(sender, decode, 3)
        await asyncio.sleep(0.01)
        assert decode.stats().recv_slots_used == 6
        async with asyncio.timeout(5.0):
            await one_after_the_other(three, decode, 1)
            await idle(decode)
