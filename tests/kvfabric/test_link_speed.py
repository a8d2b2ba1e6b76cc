import pytest

from kvfabric.link_speed import LinkSpeed

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
