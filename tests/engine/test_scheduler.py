import pytest

from engine.errors import NotReserved, RequestTooLong, UnknownRequest
from engine.request import FinishReason, Leg, RequestId
from engine.sequence import Sequence, Status
from tests.engine.requests import make_request
from tests.engine.scheduler_drive import Drive


def test_a_prompt_is_computed_in_chunks_and_sampled_once() -> None:
    drive = Drive.build(token_budget=4)
    seq = drive.submit(make_request(prompt_len=10, max_tokens=2))
    steps = [drive.step() for _ in range(4)]
    assert [c.num_tokens for [c] in steps] == [4, 4, 2, 1]
    assert [c.token_id for [c] in steps] == [None, None, 9, 9]
    assert seq.finish_reason is FinishReason.LENGTH
    drive.check_empty()


def test_decodes_come_first_and_prefills_share_the_rest() -> None:
    drive = Drive.build(token_budget=6)
    old = drive.submit(make_request("old", prompt_len=2, max_tokens=20))
    drive.step()
    long = drive.submit(make_request("long", prompt_len=12, max_tokens=1))
    drive.submit(make_request("next", prompt_len=4, max_tokens=1))
    for expected in (
        {"old": 1, "long": 5},
        {"old": 1, "long": 5},
        {"old": 1, "long": 2, "next": 3},
    ):
        computed = drive.step()
        assert {c.seq.request_id: c.num_tokens for c in computed} == expected
    assert status(long) is Status.ENDED
    assert old.num_output_tokens == 4


def test_no_more_sequences_than_slots_or_budget() -> None:
    drive = Drive.build(token_budget=3, max_num_seqs=8)
    for i in range(5):
        drive.submit(make_request(str(i), prompt_len=1, max_tokens=3))
    assert [len(drive.step()) for _ in range(6)] == [3, 3, 3, 2, 2, 2]
    drive.check_empty()


def test_what_can_never_fit_is_refused_with_the_numbers() -> None:
    drive = Drive.build(num_blocks=2, block_size=4, max_model_len=100)
    drive.submit(make_request("fits", prompt_len=7))
    with pytest.raises(RequestTooLong, match=r"8 tokens .* at most 8 .* 2 blocks of 4"):
        drive.submit(make_request("long", prompt_len=6, outputs=(1, 2)))


def test_a_request_that_does_not_fit_now_waits_and_nobody_overtakes_it() -> None:
    drive = Drive.build(num_blocks=6, block_size=4, token_budget=32)
    first = drive.submit(make_request("first", prompt_len=12, max_tokens=3))
    big = drive.submit(make_request("big", prompt_len=16, max_tokens=1))
    small = drive.submit(make_request("small", prompt_len=1, max_tokens=1))
    drive.step()
    assert [status(first), status(big), status(small)] == [Status.RUNNING] + 2 * [Status.WAITING]
    drive.step()
    drive.step()
    assert status(first) is Status.ENDED
    drive.step()
    assert status(big) is status(small) is Status.ENDED


def test_the_youngest_gives_way_and_computes_again() -> None:
    drive = Drive.build(num_blocks=4, block_size=4, token_budget=16)
    old = drive.submit(make_request("old", prompt_len=4, max_tokens=8))
    young = drive.submit(make_request("young", prompt_len=3, max_tokens=8))
    while status(young) is not Status.WAITING or not young.num_output_tokens:
        drive.step()
    assert drive.scheduler.preemption.num_preemptions == 1
    assert young.num_computed_tokens == 0
    outputs_before = young.num_output_tokens
    while status(old) is not Status.ENDED:
        drive.step()
    [computed] = drive.step()
    assert (computed.seq, computed.first_position) == (young, 0)
    assert computed.num_tokens == 3 + outputs_before
    while status(young) is not Status.ENDED:
        drive.step()
    assert young.num_output_tokens == old.num_output_tokens == 8
    drive.check_empty()


def test_a_decode_leg_is_reserved_claimed_and_attached() -> None:
    drive = Drive.build(block_size=4)
    seq = drive.submit(make_request(prompt_len=8, max_tokens=3, leg=Leg.DECODE))
    with pytest.raises(NotReserved):
        drive.scheduler.claim(seq.request_id)
    assert drive.step() == []
    assert drive.last.reserved == [seq]
    assert drive.scheduler.pool.ledger().promised == 3  # two for the prompt, one of headroom
    lease = drive.scheduler.claim(seq.request_id)
    assert drive.scheduler.claim(seq.request_id) is lease
    assert len(lease.block_table) == 3
    drive.attach(seq)
    assert [(c.first_position, c.num_tokens) for c in drive.step()] == [(8, 1)]
    drive.step()
    assert drive.ended == {seq.request_id: FinishReason.LENGTH}
    assert lease.closed
    drive.check_empty()


def test_a_resumed_decode_leg_computes_only_its_tail() -> None:
    drive = Drive.build(token_budget=16)
    request = make_request(prompt_len=8, max_tokens=5, leg=Leg.DECODE, outputs=(1, 2, 3))
    seq = drive.submit(request)
    drive.step()
    drive.scheduler.claim(seq.request_id)
    drive.attach(seq)
    [computed] = drive.step()
    assert (computed.first_position, computed.num_tokens, computed.token_id) == (8, 3, 9)
    assert list(seq.token_ids[8:12]) == [1, 2, 3, 9]


def test_attach_without_a_first_token_computes_the_last_prompt_token() -> None:
    drive = Drive.build()
    seq = drive.submit(make_request(prompt_len=8, leg=Leg.DECODE))
    drive.step()
    drive.scheduler.claim(seq.request_id)
    drive.attach(seq, has_first_token=False)
    [computed] = drive.step()
    assert (computed.first_position, computed.num_tokens, computed.token_id) == (7, 1, 9)


@pytest.mark.parametrize(("max_tokens", "stop"), [(1, frozenset[int]()), (5, frozenset({9}))])
def test_a_first_token_can_be_the_last(max_tokens: int, stop: frozenset[int]) -> None:
    drive = Drive.build()
    seq = drive.submit(make_request(max_tokens=max_tokens, leg=Leg.DECODE, stop=stop))
    drive.step()
    drive.scheduler.claim(seq.request_id)
    drive.attach(seq)
    reason = FinishReason.STOP if stop else FinishReason.LENGTH
    assert drive.ended == {seq.request_id: reason}
    drive.check_empty()


def test_attach_and_claim_after_an_abort_are_harmless() -> None:
    drive = Drive.build()
    seq = drive.submit(make_request(leg=Leg.DECODE))
    drive.step()
    assert drive.scheduler.attach(seq.request_id, 9) is None  # promised, not claimed
    drive.abort(seq)
    drive.abort(seq)
    assert drive.scheduler.attach(seq.request_id, 9) is None
    with pytest.raises(UnknownRequest):
        drive.scheduler.claim(seq.request_id)
    drive.check_empty()


@pytest.mark.parametrize("claimed", [False, True])
def test_memory_pressure_takes_a_reservation_back(claimed: bool) -> None:
    drive = Drive.build(num_blocks=5, block_size=4, token_budget=16)
    old = drive.submit(make_request("old", prompt_len=4, max_tokens=12))
    drive.step()
    young = drive.submit(make_request("young", prompt_len=4, max_tokens=8, leg=Leg.DECODE))
    drive.step()
    assert drive.last.reserved == [young]
    if claimed:
        drive.start_copy(young)
    while status(young) is Status.AWAITING_KV:
        drive.step()
    assert drive.last.lost == [young]
    assert drive.scheduler.preemption.num_preemptions == 0
    if claimed:
        assert drive.scheduler.pool.ledger().in_flight == 2
        stuck = old.num_tokens
        drive.step()
        assert old.num_tokens == stuck  # blocks in flight are waited for
        drive.end_copy(drive.copies[0])
    while status(old) is not Status.ENDED:
        drive.step()
    drive.step()
    assert drive.last.reserved == [young] or status(young) is Status.AWAITING_KV
    drive.scheduler.claim(young.request_id)
    drive.attach(young)
    while status(young) is not Status.ENDED:
        drive.step()
    drive.check_empty()


def test_a_prefill_leg_holds_its_blocks_until_released_and_never_gives_way() -> None:
    drive = Drive.build(num_blocks=5, block_size=4, token_budget=16)
    old = drive.submit(make_request("old", prompt_len=4, max_tokens=12))
    drive.step()
    leg = drive.submit(make_request("leg", prompt_len=8, max_tokens=12, leg=Leg.PREFILL))
    [decode, prefill] = drive.step()
    assert (decode.seq, prefill.seq, prefill.token_id) == (old, leg, 9)
    assert status(leg) is Status.HELD
    while drive.step():
        pass
    assert status(old) is Status.RUNNING  # needs a block, finds nobody to give way
    assert len(leg.block_table) == 2
    drive.abort(leg)
    while status(old) is not Status.ENDED:
        drive.step()
    drive.check_empty()


def test_a_prefill_leg_with_delivered_outputs_samples_nothing() -> None:
    drive = Drive.build(token_budget=5)
    leg = drive.submit(make_request(prompt_len=8, leg=Leg.PREFILL, outputs=(1, 2)))
    steps = [drive.step(), drive.step(), drive.step()]
    assert [[(c.num_tokens, c.token_id) for c in step] for step in steps] == [
        [(5, None)],
        [(3, None)],
        [],
    ]
    assert status(leg) is Status.HELD


def test_a_prefill_lease_may_be_taken_before_there_are_blocks() -> None:
    drive = Drive.build(block_size=4, token_budget=4)
    leg = drive.submit(make_request(prompt_len=8, leg=Leg.PREFILL))
    lease = drive.scheduler.lease(leg.request_id)
    assert lease.block_table == []
    drive.step()
    assert len(lease.block_table) == 2
    lease.enter()
    drive.abort(leg)
    assert drive.scheduler.pool.ledger().in_flight == 2
    lease.exit()
    drive.check_empty()


def test_reservations_overtake_a_prompt_that_waits_for_the_budget_alone() -> None:
    drive = Drive.build(num_blocks=16, block_size=4, token_budget=4)
    drive.submit(make_request("running", prompt_len=12))
    drive.step()
    local = drive.submit(make_request("local", prompt_len=16, max_tokens=1))
    fits = drive.submit(make_request("fits", prompt_len=8, leg=Leg.DECODE))
    drive.submit(make_request("not", prompt_len=24, leg=Leg.DECODE))
    drive.step()
    assert status(local) is Status.WAITING
    assert drive.last.reserved == [fits]


def test_the_context_ends_a_sequence() -> None:
    drive = Drive.build(max_model_len=8)
    seq = drive.submit(make_request(prompt_len=6, max_tokens=100))
    drive.step()
    drive.step()
    assert seq.finish_reason is FinishReason.LENGTH
    assert seq.num_tokens == 8


def test_end_ids_end_a_sequence_unless_ignored() -> None:
    drive = Drive.build()
    stops = drive.submit(make_request("stops", stop=frozenset({9})))
    drive.step()
    assert stops.finish_reason is FinishReason.STOP
    drive.scheduler.abort(RequestId("never heard of"))


def status(seq: Sequence) -> Status:
    """For the type checker, which takes a status it has seen for lasting."""
    return seq.status
