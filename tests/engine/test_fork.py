"""Samples of one prompt: what they share, what they copy, and that each is as if it ran alone."""

import pytest

from engine.errors import InvalidRequest, RequestTooLong
from engine.request import (
    EngineEvent,
    FinishReason,
    FirstToken,
    Leg,
    RequestFailed,
    RequestId,
    TokensOut,
)
from engine.sequence import Sequence, Status
from tests.engine.fake_runner import expected_tokens
from tests.engine.loop_rig import Rig, build_rig, wait_until
from tests.engine.requests import make_request
from tests.engine.scheduler_drive import Drive, sample_id

R = RequestId("r")


def tables(*seqs: Sequence) -> list[list[int]]:
    return [[int(block_id) for block_id in seq.block_table] for seq in seqs]


@pytest.mark.parametrize(("prompt_len", "num_shared"), [(7, 1), (8, 2), (9, 2), (3, 0)])
def test_whole_blocks_are_shared_and_tails_are_not(prompt_len: int, num_shared: int) -> None:
    drive = Drive.build(token_budget=16)
    seq = drive.submit(make_request(prompt_len=prompt_len, max_tokens=6, others=[(), ()]))
    forks = list(seq.forks)
    before = drive.scheduler.pool.ledger()
    computed = drive.step()
    assert [(done.seq, done.num_tokens) for done in computed] == [
        (seq, prompt_len),
        (forks[0], 0),
        (forks[1], 0),
    ]
    first, *others = tables(seq, *forks)
    own = [set(table[num_shared:]) for table in (first, *others)]
    assert all(table[:num_shared] == first[:num_shared] for table in others)
    assert len(set.union(*own)) == sum(map(len, own))
    # One block of headroom each, but for the leader, which takes its own when it needs it.
    needed = drive.scheduler.pool.blocks_for(prompt_len)
    tail = needed - num_shared
    held = needed + 2 * (tail + 1)
    assert before.held == 0
    assert drive.scheduler.pool.ledger().held == held
    while drive.scheduler.seqs:
        drive.step()
    assert drive.ended == {sample_id(one): FinishReason.LENGTH for one in (seq, *forks)}
    drive.check_empty()


def test_no_prompt_token_is_computed_twice() -> None:
    drive = Drive.build(token_budget=4)
    drive.submit(make_request(prompt_len=9, max_tokens=3, others=[(), (), ()]))
    computed = [done for _ in range(8) for done in drive.step()]
    assert sum(max(0, 9 - done.first_position) and done.num_tokens for done in computed) == 9
    assert not drive.scheduler.seqs


def test_samples_come_in_as_one() -> None:
    drive = Drive.build(token_budget=16, max_num_seqs=4)
    first = drive.submit(make_request("a", max_tokens=9, others=[(), ()]))
    second = drive.submit(make_request("b", max_tokens=9, others=[()]))
    for _ in range(4):
        drive.step()
    assert not second.block_table  # one slot is free, and it takes two
    drive.abort(first)
    drive.step()
    assert second.status is Status.RUNNING
    with pytest.raises(InvalidRequest, match="n is 5; at most 4"):
        drive.scheduler.check_fits(make_request(others=[()] * 4))
    # A prefill leg runs one sequence, however many samples are drawn from it.
    drive.scheduler.check_fits(make_request(others=[()] * 4, leg=Leg.PREFILL))


def test_samples_that_never_fit_are_refused() -> None:
    drive = Drive.build(num_blocks=4, block_size=4)
    drive.scheduler.check_fits(make_request(prompt_len=6, max_tokens=2, others=[(), ()]))
    with pytest.raises(RequestTooLong, match="n is 4"):
        drive.scheduler.check_fits(make_request(prompt_len=6, max_tokens=2, others=[()] * 3))


def test_a_promise_covers_all_tails() -> None:
    drive = Drive.build(num_blocks=6, block_size=4)
    seq = drive.submit(make_request(prompt_len=6, leg=Leg.DECODE, others=[()]))
    waiting = drive.submit(make_request("next", prompt_len=6, max_tokens=1))
    drive.step()
    # A whole block, and for each a tail and headroom.
    assert drive.scheduler.pool.ledger().promised == 5
    assert waiting.status is Status.WAITING
    drive.scheduler.claim(seq.request_id)
    assert drive.scheduler.pool.ledger().promised == 2
    drive.attach(seq)
    assert drive.scheduler.pool.ledger().promised == 0
    while drive.scheduler.seqs:
        drive.step()
    drive.check_empty()


def test_a_sample_that_ends_at_its_first_token_never_forks() -> None:
    drive = Drive.build(token_budget=16)
    seq = drive.submit(make_request(max_tokens=1, others=[(), ()]))
    drive.step()
    assert len(drive.ended) == 3
    assert seq.status is Status.ENDED
    drive.check_empty()


def test_resumed_tails_beyond_the_pool_come_in_later() -> None:
    drive = Drive.build(num_blocks=7, block_size=4, token_budget=16)
    tail = tuple(range(50, 60))
    request = make_request(prompt_len=4, max_tokens=14, outputs=tail, others=[tail, tail])
    seq = drive.submit(request)
    assert [one.status for one in drive.seqs.values()] == [Status.WAITING] * 3
    assert not seq.forks
    for _ in range(60):
        drive.step()
    assert set(drive.ended.values()) == {FinishReason.LENGTH}
    assert len(drive.ended) == 3
    drive.check_empty()


def test_a_sample_that_is_finished_gives_its_blocks_back_at_once() -> None:
    drive = Drive.build(token_budget=16)
    seq = drive.submit(make_request(prompt_len=9, max_tokens=30, others=[(), ()]))
    scheduler, (one, two) = drive.scheduler, seq.forks
    assert scheduler.finish(R, 1) is None, "the others are still to fork from one of them"
    drive.step()
    for ended, going_on in ((one, [seq, two]), (seq, [two])):  # the leader is one like any other
        drive.step()
        held, own = scheduler.pool.ledger().held, len(ended.block_table)
        shared = set(ended.block_table) & {int(i) for s in going_on for i in s.block_table}
        assert scheduler.finish(R, ended.request.sample) is ended
        assert (ended.status, ended.finish_reason) == (Status.ENDED, FinishReason.STOP)
        assert scheduler.pool.ledger().held == held - own + len(shared)
        assert scheduler.finish(R, ended.request.sample) is None
        assert scheduler.samples(R) == going_on
    assert scheduler.finish(RequestId("another"), 0) is None
    while scheduler.seqs:
        drive.step()
    assert two.finish_reason is FinishReason.LENGTH
    assert two.num_output_tokens == 30
    drive.check_empty()


def test_one_that_gave_way_may_be_finished_too() -> None:
    drive = Drive.build(num_blocks=9, block_size=4, token_budget=16)
    seq = drive.submit(make_request(prompt_len=4, max_tokens=28, others=[()]))
    (other,) = seq.forks
    while other.status is not Status.WAITING:
        drive.step()
    assert drive.scheduler.finish(R, 1) is other
    while drive.scheduler.seqs:
        drive.step()
    assert seq.num_output_tokens == 28
    drive.check_empty()


def started(num_blocks: int = 64) -> Rig:
    rig = build_rig(num_blocks=num_blocks)
    rig.loop.start()
    return rig


def outputs(rig: Rig) -> dict[int, list[int]]:
    told: dict[int, list[int]] = {}
    for event in rig.listener.of(TokensOut, R):
        tokens = told.setdefault(event.sample, [])
        assert event.first_index == len(tokens)
        tokens += event.token_ids
    return told


@pytest.mark.parametrize("prompt_len", [1, 3, 4, 5, 8, 21])
@pytest.mark.parametrize("leg", [Leg.LOCAL, Leg.DECODE])
def test_each_sample_is_as_if_it_ran_alone(prompt_len: int, leg: Leg) -> None:
    rig = started()
    request = make_request(prompt_len=prompt_len, max_tokens=9, leg=leg, others=[(), (), ()])
    expected = {one.sample: list(expected_tokens(one)) for one in request.each()}
    try:
        if leg is Leg.LOCAL:
            rig.loop.submit(request)
        else:
            rig.reserve_and_claim(request)
            others = {s: FirstToken(expected[s][0]) for s in (1, 2, 3)}
            rig.loop.attach(R, expected[0][0], None, others)
        wait_until(lambda: sum(map(len, outputs(rig).values())) == 36)
        assert outputs(rig) == expected
        stats = rig.loop.stats()
        assert stats.prompt_tokens_computed == (prompt_len if leg is Leg.LOCAL else 0)
        rig.wait_free()
    finally:
        rig.loop.stop()


def test_pressure_changes_no_token() -> None:
    """Four samples that the pool cannot hold to their ends."""
    rig = started(num_blocks=12)
    request = make_request(prompt_len=9, max_tokens=30, others=[(), (), ()])
    try:
        rig.loop.submit(request)
        wait_until(lambda: sum(map(len, outputs(rig).values())) == 120)
        assert outputs(rig) == {one.sample: list(expected_tokens(one)) for one in request.each()}
        assert rig.loop.stats().preemptions > 0
        rig.wait_free()
    finally:
        rig.loop.stop()


def test_an_abort_ends_all_and_a_failure_is_told_once() -> None:
    rig = started()
    try:
        rig.loop.submit(make_request(prompt_len=9, max_tokens=500, others=[(), ()]))
        wait_until(lambda: len(outputs(rig)) == 3)
        rig.loop.abort(R)
        rig.wait_free()
        assert not rig.listener.of(RequestFailed, R)
        rig.loop.submit(make_request(prompt_len=9, max_tokens=900, others=[(), ()]))
    finally:
        rig.loop.stop()
    assert len(rig.listener.of(RequestFailed, R)) == 1


@pytest.mark.parametrize("leg", [Leg.LOCAL, Leg.DECODE])
def test_the_others_do_not_feel_that_one_is_finished(leg: Leg) -> None:
    rig = build_rig()
    hear = rig.loop.on_events

    def hear_and_finish(events: list[EngineEvent]) -> None:
        hear(events)
        if any(isinstance(event, TokensOut) and event.first_index == 3 for event in events):
            rig.loop.finish(R, 0)
            rig.loop.finish(R, 7)

    rig.loop.on_events = hear_and_finish
    rig.loop.start()
    request = make_request(prompt_len=9, max_tokens=90, leg=leg, others=[(), ()])
    expected = {one.sample: list(expected_tokens(one)) for one in request.each()}
    try:
        if leg is Leg.LOCAL:
            rig.loop.submit(request)
        else:
            rig.reserve_and_claim(request)
            rig.loop.attach(
                R, expected[0][0], None, {s: FirstToken(expected[s][0]) for s in (1, 2)}
            )
        wait_until(lambda: len(outputs(rig)) == 3)
        wait_until(lambda: sum(len(outputs(rig)[sample]) for sample in (1, 2)) == 180)
        told = outputs(rig)
        assert (told[1], told[2]) == (expected[1], expected[2])
        assert told[0] == expected[0][:4]
        last = [event for event in rig.listener.of(TokensOut, R) if event.sample == 0][-1]
        assert (last.token_ids, last.finish_reason) == ((), FinishReason.STOP)
        rig.wait_free()
    finally:
        rig.loop.stop()
