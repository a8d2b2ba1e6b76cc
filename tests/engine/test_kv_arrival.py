"""A transfer that breaks off for good: the sequence computes what has not come."""

import pytest

from engine.errors import NotReserved
from engine.request import Leg
from engine.sequence import Sequence, Status
from tests.engine.requests import make_request
from tests.engine.scheduler_drive import Drive


def awaiting(drive: Drive, prompt_len: int = 10) -> Sequence:
    """A decode leg with blocks, into which somebody copies."""
    seq = drive.submit(make_request(prompt_len=prompt_len, max_tokens=3, leg=Leg.DECODE))
    drive.step()
    drive.start_copy(seq)
    return seq


def test_one_whose_kv_stops_coming_computes_the_rest_behind_what_came() -> None:
    drive = Drive.build(block_size=4, token_budget=16)
    seq = awaiting(drive)
    drive.end_copy(drive.copies[0])
    drive.compute_rest(seq, 8)
    assert [(c.first_position, c.num_tokens, c.token_id) for c in drive.step()] == [(8, 2, 9)]
    with pytest.raises(NotReserved):
        drive.scheduler.claim(seq.request_id)
    while seq.status is not Status.ENDED:
        drive.step()
    drive.check_empty()


def test_it_waits_for_the_copies_under_way() -> None:
    drive = Drive.build(block_size=4, token_budget=16)
    seq = awaiting(drive)
    drive.compute_rest(seq, 4)
    assert drive.step() == []
    with pytest.raises(NotReserved):
        drive.scheduler.claim(seq.request_id)  # a late frame finds no lease
    assert drive.scheduler.attach(seq.request_id, 9) is None  # nor does a late COMMIT
    drive.compute_rest(seq, 8)  # said twice
    drive.end_copy(drive.copies[0])
    assert [(c.first_position, c.num_tokens) for c in drive.step()] == [(4, 6)]


def test_aborted_while_copies_end_its_blocks_stay_in_flight_until_then() -> None:
    drive = Drive.build(block_size=4)
    seq = awaiting(drive)
    drive.compute_rest(seq, 4)
    drive.abort(seq)
    assert drive.scheduler.pool.ledger().in_flight == 4
    drive.end_copy(drive.copies[0])
    drive.check_empty()


def test_one_that_has_no_room_yet_comes_in_as_a_local_one() -> None:
    drive = Drive.build(num_blocks=4, block_size=4, token_budget=16)
    first = drive.submit(make_request("first", prompt_len=12, max_tokens=4))
    late = drive.submit(make_request("late", prompt_len=8, max_tokens=2, leg=Leg.DECODE))
    drive.step()
    assert drive.scheduler.num_waiting == 1
    drive.compute_rest(late, 0)
    while first.status is not Status.ENDED:
        drive.step()
    drive.step()
    assert drive.last.reserved == []
    assert late.status is Status.RUNNING


def test_what_came_before_its_room_was_lost_does_not_count() -> None:
    """The service may not have heard yet that it has other blocks now."""
    drive = Drive.build(block_size=4, token_budget=16)
    seq = drive.submit(make_request(prompt_len=10, max_tokens=3, leg=Leg.DECODE))
    drive.step()  # promised, and nothing has come into these blocks
    drive.compute_rest(seq, 8)
    assert [(c.first_position, c.num_tokens) for c in drive.step()] == [(0, 10)]
