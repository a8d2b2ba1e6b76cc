"""Sequences that give way and come back: what is copied, what is computed again, what is held."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.kv_lease import KVLease
from engine.request import RequestId
from engine.sequence import Sequence, Status
from engine.step_cost import StepCost
from engine.swap_space import SwapSpace
from tests.engine.known_cost import make_known
from tests.engine.requests import make_request
from tests.engine.scheduler_drive import Drive

TOKEN_SECONDS = 0.001


def tight(num_blocks: int = 6, swap_tokens: int = 1000, *, prefix_caching: bool = False) -> Drive:
    drive = Drive.build(
        num_blocks=num_blocks,
        block_size=4,
        token_budget=16,
        prefix_caching=prefix_caching,
        swap_tokens=swap_tokens,
    )
    make_known(drive.scheduler.cost, [0, TOKEN_SECONDS, 0, TOKEN_SECONDS, 0])
    return drive


def status(seq: Sequence) -> Status:
    return seq.status


def preempted(drive: Drive, *, swaps: bool = True, old_len: int = 7) -> tuple[Sequence, Sequence]:
    """An old sequence, and a young one that has just given way to it, with 2 outputs or more."""
    old = drive.submit(make_request("old", prompt_len=old_len, max_tokens=16))
    young = drive.submit(make_request("young", prompt=tuple(range(50, 57)), max_tokens=12))
    while status(young) is not Status.WAITING or not young.was_preempted:
        drive.step()
    assert bool(drive.swaps) == swaps == (young.swap is not None)
    return old, young


def run_out(drive: Drive, *seqs: Sequence) -> dict[Sequence, list[int]]:
    """First positions of all computing from now on."""
    positions: dict[Sequence, list[int]] = {seq: [] for seq in seqs}
    for _ in range(200):
        for done in drive.step():
            positions[done.seq].append(done.first_position)
        drive.end_swap()
        if all(seq.status is Status.ENDED for seq in seqs):
            return positions
    raise AssertionError("they do not end")


def space(drive: Drive) -> SwapSpace:
    return drive.scheduler.preemption.space


def test_what_was_swapped_is_not_computed_again() -> None:
    drive = tight()
    old, young = preempted(drive)
    computed = len(drive.swapped[young.swap]) if young.swap else 0
    assert computed == young.num_tokens - 1
    assert space(drive).used_nbytes == computed
    assert drive.scheduler.pool.ledger().in_flight > 0
    before = old.num_tokens
    assert drive.step() == []  # the blocks come free when they are copied
    drive.end_swap()
    drive.step()
    assert old.num_tokens == before + 1
    positions = run_out(drive, old, young)
    assert positions[young] == list(range(computed, young.num_tokens - 1))
    assert (space(drive).tokens_out, space(drive).tokens_in) == (computed, computed)
    drive.check_empty()


def test_without_room_it_is_computed_again() -> None:
    drive = tight(swap_tokens=3)
    old, young = preempted(drive, swaps=False)
    assert run_out(drive, old, young)[young][0] == 0
    drive.check_empty()


@pytest.mark.parametrize("lost", ["out", "in"])
def test_a_copy_that_failed_is_made_good_by_computing(lost: str) -> None:
    drive = tight()
    old, young = preempted(drive)
    drive.end_swap(is_lost=lost == "out")
    while status(young) is Status.WAITING:
        drive.step()
    if lost == "in":
        assert status(young) is Status.SWAPPING_IN
        drive.end_swap(is_lost=True)
        assert status(young) is Status.RUNNING
    assert young.num_computed_tokens == 0 or status(old) is Status.ENDED
    positions = run_out(drive, old, young)
    assert lost == "out" or positions[young][0] == 0
    assert space(drive).tokens_in == 0
    drive.check_empty()


@pytest.mark.parametrize("when", ["copying out", "copied out", "coming back"])
def test_an_abort_gives_all_back(when: str) -> None:
    drive = tight()
    old, young = preempted(drive)
    if when != "copying out":
        drive.end_swap()
    if when == "coming back":
        while status(young) is not Status.SWAPPING_IN:
            drive.step()
    drive.abort(young)
    assert (space(drive).used_nbytes > 0) == bool(drive.swaps)
    run_out(drive, old)
    drive.check_empty()


def test_a_prefix_that_is_still_cached_is_not_copied_back() -> None:
    drive = tight(prefix_caching=True)
    old, young = preempted(drive, old_len=8)
    num_out = young.num_tokens - 1
    drive.end_swap()
    drive.abort(old)
    drive.step()
    assert status(young) is Status.SWAPPING_IN
    [(_, swap_in)] = drive.swaps
    assert swap_in is not None
    assert swap_in.first_token == young.num_cached_tokens > 0
    drive.end_swap()
    assert space(drive).tokens_in == num_out - young.num_cached_tokens
    run_out(drive, young)
    drive.check_empty()


def known_space(speed: float = 1.0) -> SwapSpace:
    cost = make_known(StepCost(), [0, 0, 0, TOKEN_SECONDS * speed, 0])
    return SwapSpace(cost, token_budget=100, capacity_nbytes=1000, token_nbytes=10)


@pytest.mark.parametrize("speed", [0.01, 1.0, 100.0])
@pytest.mark.parametrize(("copy_cost", "is_cheaper"), [(0.4, True), (0.6, False)])
def test_the_cheaper_way_is_taken(speed: float, copy_cost: float, is_cheaper: bool) -> None:
    """Both ways at `copy_cost` of what computing costs."""
    swaps = known_space(speed)
    assert swaps.is_cheaper(50)  # tried, for the rates are unknown
    swap = swaps.begin(RequestId("r"), KVLease(RequestId("r"), [], lambda lease: None), 50)
    assert swap is not None
    seconds = 50 * TOKEN_SECONDS * speed * copy_cost
    swaps.copied_out(swap, seconds)
    swaps.copied_in(swap, 50, seconds)
    assert swaps.used_nbytes == 0
    assert swaps.is_cheaper(70) == is_cheaper


def test_a_model_that_knows_nothing_swaps_nothing() -> None:
    assert not SwapSpace(StepCost(), 100, capacity_nbytes=1000).is_cheaper(5)


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_under_pressure_all_end_and_the_oldest_never_waits_long(data: st.DataObject) -> None:
    """More sequences than the pool holds, host memory of any size, copies that end when they
    like or fail: nobody is stuck, nothing leaks, and what is taken for computed is there."""
    drive = tight(
        num_blocks=data.draw(st.integers(4, 9)),
        swap_tokens=data.draw(st.sampled_from((0, 10, 30, 1000))),
        prefix_caching=data.draw(st.booleans()),
    )
    shared = data.draw(st.booleans())
    for index in range(data.draw(st.integers(2, 6))):
        first = 0 if shared else 50 * index
        prompt = tuple(range(first, first + data.draw(st.integers(1, 9))))
        drive.submit(
            make_request(str(index), prompt=prompt, max_tokens=data.draw(st.integers(1, 7)))
        )
    stuck = 0
    while live := [seq for seq in drive.seqs.values() if seq.status is not Status.ENDED]:
        before = live[0].num_tokens, live[0].num_computed_tokens
        drive.step()
        is_copying = bool(drive.swaps)  # what ends below was under way in this step
        if data.draw(st.booleans()) or stuck > 3:
            drive.end_swap(is_lost=data.draw(st.integers(0, 5)) == 0)
        after = live[0].num_tokens, live[0].num_computed_tokens
        is_waiting_for_copy = is_copying and before == after
        stuck = stuck + 1 if is_waiting_for_copy else 0
        assert after > before or stuck, "the oldest waits for nothing"
        assert stuck < 20
        if data.draw(st.integers(0, 30)) == 0:
            drive.abort(data.draw(st.sampled_from(live)))
    while drive.swaps:
        drive.end_swap()
    drive.check_empty()
