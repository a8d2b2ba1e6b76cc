import pytest

from kvfabric.link_speed import LinkSpeed
from tests.kvfabric.rig import (
    SHAPE,
    Sink,
    Source,
    make_ticket,
    open_nodes,
    ship_all,
    shipped,
    zero_kv,
)

MIB = 1 << 20


def test_nothing_is_known_before_a_frame_has_arrived() -> None:
    assert LinkSpeed().nbytes_per_s is None


def test_frames_that_wait_behind_each_other_are_not_slower_for_it() -> None:
    speed = LinkSpeed()
    for index in range(4):  # all posted at once; the wire carries one after the other
        speed.received(4 * MIB, posted_s=10.0, received_s=10.1 + 0.1 * index)
    assert speed.nbytes_per_s == pytest.approx(40 * MIB)


def test_a_pause_for_want_of_frames_is_not_the_links() -> None:
    speed = LinkSpeed()
    speed.received(4 * MIB, posted_s=1.0, received_s=1.1)
    speed.received(4 * MIB, posted_s=60.0, received_s=60.1)
    assert speed.nbytes_per_s == pytest.approx(40 * MIB)


def test_small_messages_tell_nothing() -> None:
    speed = LinkSpeed()
    speed.received(100, posted_s=1.0, received_s=1.000001)
    assert speed.nbytes_per_s is None


def test_it_follows_a_link_that_changes() -> None:
    speed = LinkSpeed()
    for index in range(20):
        speed.received(MIB, posted_s=index, received_s=index + 0.01)
    for index in range(20, 40):
        speed.received(MIB, posted_s=index, received_s=index + 0.1)
    assert speed.nbytes_per_s == pytest.approx(10 * MIB, rel=0.05)


@pytest.mark.asyncio
@pytest.mark.parametrize("codecs", [(), (1,)])
async def test_a_link_learns_from_transfers_that_may_take_a_codec(codecs: tuple[int, ...]) -> None:
    async with open_nodes("inproc", slot_nbytes=512 << 10) as (prefill, decode):
        ticket, sink = make_ticket(decode, 2048, codecs=codecs), Sink(2048)
        decode.expect(ticket, SHAPE, sink)
        await shipped(ship_all(prefill, ticket, Source(zero_kv(2048))))
        await sink.commit()
        speeds = prefill.stats().links_nbytes_per_s
        assert [speed > 0 for speed in speeds.values()] == [True] * len(codecs)
