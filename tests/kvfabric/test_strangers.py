"""Who is judged a stranger at the listening port, and when."""

from kvfabric.strangers import (
    MAX_CALLERS,
    MAX_LOOKS,
    STUCK_LOOKS,
    Caller,
    Peer,
    Strangers,
)


def caller(number: int, is_stuck: bool = False) -> Caller:
    return Caller(inode=number, peer=Peer("10.0.0.1", number), is_stuck=is_stuck)


def looks_until_reset(strangers: Strangers, seen: Caller) -> int:
    for num_looks in range(1, 2 * MAX_LOOKS):
        if strangers.judge([seen], set()):
            return num_looks
    raise AssertionError("it stands there for ever")


def test_the_stuck_go_soon_and_the_silent_later() -> None:
    assert looks_until_reset(Strangers(), caller(1, is_stuck=True)) == STUCK_LOOKS
    assert looks_until_reset(Strangers(), caller(1)) == MAX_LOOKS


def test_who_moves_on_in_between_is_not_stuck() -> None:
    strangers = Strangers()
    for is_stuck in (True, True, False, True, True):
        assert not strangers.judge([caller(1, is_stuck)], set())
    assert strangers.judge([caller(1, is_stuck=True)], set())


def test_peers_are_never_touched_however_they_look() -> None:
    strangers, peer = Strangers(), caller(1, is_stuck=True)
    for _ in range(3 * MAX_LOOKS):
        assert not strangers.judge([peer], {peer.peer})


def test_who_becomes_a_peer_in_time_stays_and_begins_anew_when_it_is_none_any_more() -> None:
    strangers, late = Strangers(), caller(1)
    for _ in range(MAX_LOOKS - 1):
        assert not strangers.judge([late], set())
    assert not strangers.judge([late], {late.peer})
    assert looks_until_reset(strangers, late) == MAX_LOOKS


def test_a_number_that_is_used_again_is_somebody_else() -> None:
    strangers = Strangers()
    for _ in range(MAX_LOOKS - 1):
        strangers.judge([caller(1)], set())
    assert not strangers.judge([], set())
    assert looks_until_reset(strangers, caller(1)) == MAX_LOOKS


def test_of_a_crowd_the_first_to_come_go_first_and_newcomers_never() -> None:
    strangers = Strangers()
    crowd = [caller(number) for number in range(MAX_CALLERS + 30)]
    assert not strangers.judge(crowd, set()), "all of them may be peers who have just come"
    newcomers = [caller(number) for number in range(1000, 1400)]
    admitted = {crowd[0].peer}
    reset = strangers.judge([*newcomers, *crowd], admitted)
    assert reset == crowd[1:30]
