from itertools import count

import pytest

from kvfabric.config import FabricConfig
from kvfabric.link_speed import LinkSpeed
from kvfabric.node import Node
from kvfabric.pace import Pace
from tests.kvfabric.rig import (
    SHAPE,
    Sink,
    Source,
    idle,
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


def test_frames_that_may_have_waited_on_purpose_tell_nothing() -> None:
    speed = LinkSpeed()
    speed.received(MIB, posted_s=1.0, received_s=1.1)
    speed.paced(True, 1.2)
    speed.received(MIB, posted_s=1.15, received_s=5.0)  # on its way when it began
    speed.received(MIB, posted_s=2.0, received_s=9.0)
    speed.paced(False, 9.5)
    speed.received(MIB, posted_s=9.1, received_s=9.6)  # on its way when it ended
    assert speed.nbytes_per_s == pytest.approx(10 * MIB)
    for index in range(10, 40):
        speed.received(MIB, posted_s=index, received_s=index + 0.01)
    assert speed.nbytes_per_s == pytest.approx(100 * MIB, rel=0.05)


async def _ship(prefill: Node, decode: Node, codecs: tuple[int, ...]) -> list[float]:
    """Four frames; what is known of the links afterwards."""
    ticket, sink = make_ticket(decode, 2048, codecs=codecs), Sink(2048)
    decode.expect(ticket, SHAPE, sink)
    await shipped(ship_all(prefill, ticket, Source(zero_kv(2048))))
    await sink.commit()
    return list(prefill.stats().links_nbytes_per_s.values())


@pytest.mark.asyncio
@pytest.mark.parametrize("codecs", [(), (1,)])
async def test_a_link_learns_from_frames_that_its_receiver_does_not_pace(
    codecs: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    share: list[float | None] = [0.5]
    ticks = count()  # a frame takes 10 ms of the receiver's thread
    pace = Pace(lambda: share[0], lambda: 0.0, own_s=lambda: 0.01 * next(ticks))

    def node(config: FabricConfig, staging: memoryview) -> Node:
        return Node(config, staging, pace if config.generation == 2 else None)

    monkeypatch.setattr("tests.kvfabric.rig.Node", node)
    async with open_nodes("inproc", slot_nbytes=512 << 10) as (prefill, decode):
        assert await _ship(prefill, decode, codecs) == []
        share[0] = None
        learnt = await _ship(prefill, decode, codecs)
        assert len(learnt) == 1
        await idle(decode)  # nothing stands ready any more, which a frame would not wait for
        share[0] = 0.5  # after the ticket of such a transfer was minted, for all it knows
        assert await _ship(prefill, decode, codecs) == learnt
        share[0] = None
        assert await _ship(prefill, decode, codecs) != learnt
