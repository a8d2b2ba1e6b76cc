"""What a handoff of 64 tokens waits for: its own messages, and a long transfer beside it."""

import asyncio

import pytest

from tests.kvfabric.rig import (
    SHAPE,
    Source,
    expected,
    open_nodes,
    random_kv,
    ship_all,
    shipped,
    start_ship,
    zero_kv,
)
from tests.kvfabric.wire_tap import wire_tap

pytestmark = pytest.mark.asyncio

SHORT, LONG = 64, 32 << 10  # tokens; a frame holds 64


@pytest.mark.parametrize("moment", range(0, 30, 5))
@pytest.mark.parametrize("by_layers", [False, True])
async def test_a_long_transfer_is_at_most_two_frames_ahead_of_a_short_one(
    monkeypatch: pytest.MonkeyPatch, by_layers: bool, moment: int
) -> None:
    with wire_tap(monkeypatch) as tap:
        tap.frame_turns = 30  # the network takes longer for a frame than the loops
        async with open_nodes("inproc", send_slots=8, recv_slots=8) as (prefill, decode):
            long_ticket, long_sink = expected(decode, LONG)
            long = ship_all(prefill, long_ticket, Source(zero_kv(LONG)))
            short_ticket, short_sink = expected(decode, SHORT)
            await long_sink.has_installed(20)
            for _ in range(moment):  # what of the long one's window is packed and posted by then
                await asyncio.sleep(0)
            short = start_ship(prefill, short_ticket, Source(random_kv(SHORT)))
            on_the_wire = sum(not done.done() for _, done in tap.frames)
            begin = len(tap.frames)
            for num_layers in range(1, SHAPE.num_layers) if by_layers else ():
                short.extend(SHORT, num_layers)
            short.extend(SHORT)
            short.commit(b"token 0")
            await short_sink.commit()
            assert not long.done.done()
            headers = [header for header, _ in tap.frames[begin:]]
            await shipped(short)
            long.cancel()
            await long_sink.loss()
    ids = [header.transfer_id for header in headers]
    last = max(i for i, one in enumerate(ids) if one == short_ticket.transfer_id)
    ahead = sum(one == long_ticket.transfer_id for one in ids[:last])
    assert ids.count(short_ticket.transfer_id) == (SHAPE.num_layers if by_layers else 1) + 1
    assert on_the_wire + ahead <= 2, (on_the_wire, ahead)


async def test_a_short_handoff_takes_one_way_on_a_connection_that_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with wire_tap(monkeypatch) as tap:
        async with open_nodes("inproc") as (prefill, decode):
            for kinds in (
                ["Hello", "Welcome", "Offer", "KV", "COMMIT"],
                ["Offer", "KV", "COMMIT"],  # and an offer for the next: they follow closely
                ["KV", "COMMIT"],
            ):
                tap.posted.clear()
                ticket, sink = expected(decode, SHORT)
                await shipped(ship_all(prefill, ticket, Source(random_kv(SHORT))))
                await sink.commit()
                before_its_end = tap.posted[: len(kinds)]
                assert [one.kind for one in before_its_end] == kinds
                assert {one.kind for one in tap.posted[len(kinds) :]} <= {"Offer"}
                round_trips = (tap.num_turns() + 1) / 2
                assert round_trips == (1.5 if "Hello" in kinds else 0.5)
