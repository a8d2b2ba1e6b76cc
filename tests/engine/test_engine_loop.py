import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from engine.errors import LeaseClosed, NotReserved, RequestTooLong, UnknownRequest
from engine.request import (
    ChunkComputed,
    EngineEvent,
    FinishReason,
    Leg,
    RequestId,
    ReservationLost,
    Reserved,
    TokensOut,
)
from engine.sequence import Sequence
from tests.engine.fake_runner import expected_tokens
from tests.engine.loop_rig import DEADLINE_S, Rig, build_rig, wait_until
from tests.engine.requests import make_request

R = RequestId("r")


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = build_rig()
    rig.loop.start()
    yield rig
    rig.loop.stop()


def test_a_local_request_from_end_to_end(rig: Rig) -> None:
    request = make_request(prompt_len=40, max_tokens=6)
    rig.loop.submit(request)
    assert rig.listener.wait_ended(R) is FinishReason.LENGTH
    assert rig.listener.tokens(R) == expected_tokens(request)
    assert {type(event) for event in rig.listener.events(R)} == {TokensOut}
    rig.wait_free()
    stats = rig.loop.stats()
    assert (stats.prompt_tokens_computed, stats.output_tokens_computed) == (40, 5)
    assert (stats.tokens_sampled, stats.steps, stats.preemptions) == (6, 8, 0)


def test_stats_are_as_new_as_the_events(rig: Rig) -> None:
    seen: list[int] = []
    rig.listener.react = lambda event: seen.append(rig.loop.stats().tokens_sampled)
    rig.loop.submit(make_request(max_tokens=3))
    rig.listener.wait_ended(R)
    assert seen == [1, 2, 3]


def test_an_idle_loop_keeps_turning(rig: Rig) -> None:
    turns = rig.loop.stats().turns
    time.sleep(0.5)
    assert turns + 2 <= rig.loop.stats().turns <= turns + 11


def test_a_prefill_leg_tells_chunks_then_its_token_and_waits_for_release(rig: Rig) -> None:
    request = make_request(prompt_len=40, max_tokens=6, leg=Leg.PREFILL)
    rig.loop.submit(request)
    token = rig.listener.wait_for(TokensOut, R)
    chunks = rig.listener.of(ChunkComputed, R)
    assert [(c.num_computed_tokens, c.is_last) for c in chunks] == [
        (16, False),
        (32, False),
        (40, True),
    ]
    assert all(min(chunk.queue_ns, chunk.build_ns) > 0 for chunk in chunks)
    assert rig.listener.events(R) == [*chunks, token]
    assert rig.listener.batches[-1] == [chunks[-1], token]
    assert (token.token_ids, token.finish_reason) == (expected_tokens(request)[:1], None)
    lease = rig.loop.lease(R).result(DEADLINE_S)
    assert rig.runner.read(lease.block_table, 40) == request.prompt_token_ids
    assert rig.loop.stats().blocks.held == 10
    lease.enter()
    rig.loop.abort(R)
    wait_until(lambda: rig.loop.stats().blocks.in_flight == 10)
    with pytest.raises(LeaseClosed):
        lease.enter()
    lease.exit()
    rig.wait_free()


def test_a_decode_leg_joins_with_its_first_token(rig: Rig) -> None:
    request = make_request(prompt_len=10, max_tokens=5, leg=Leg.DECODE)
    rig.reserve_and_claim(request)
    expected = expected_tokens(request)
    rig.loop.attach(R, expected[0])
    assert rig.listener.wait_ended(R) is FinishReason.LENGTH
    assert rig.listener.tokens(R) == expected
    assert rig.listener.of(TokensOut, R)[0].first_index == 0
    assert len(rig.runner.waited) == 1
    assert rig.loop.stats().prompt_tokens_computed == 0
    rig.wait_free()


def test_a_resumed_decode_leg_goes_on_where_it_was(rig: Rig) -> None:
    whole = expected_tokens(make_request(prompt_len=10, max_tokens=8))
    request = make_request(prompt_len=10, max_tokens=8, leg=Leg.DECODE, outputs=whole[:3])
    rig.reserve_and_claim(request)
    rig.loop.attach(R, None)
    rig.listener.wait_ended(R)
    assert rig.listener.of(TokensOut, R)[0].first_index == 3
    assert rig.listener.tokens(R) == whole[3:]
    stats = rig.loop.stats()
    assert (stats.prompt_tokens_computed, stats.output_tokens_computed) == (0, 7)


def test_first_token_can_finish_a_decode_leg(rig: Rig) -> None:
    rig.reserve_and_claim(make_request(max_tokens=1, leg=Leg.DECODE))
    rig.loop.attach(R, 7)
    rig.listener.wait_ended(R)
    token = TokensOut(R, 0, (7,), FinishReason.LENGTH)
    assert rig.listener.of(TokensOut, R) == [token]
    rig.wait_free()


def test_reservations_are_told_before_the_step(rig: Rig) -> None:
    told_in_step: list[bool] = []

    def before_step(seqs: list[Sequence]) -> None:
        if not told_in_step:
            rig.loop.submit(make_request("d", leg=Leg.DECODE))
        elif len(told_in_step) == 1:
            told_in_step.append(bool(rig.listener.of(Reserved, RequestId("d"))))
        told_in_step.append(False)

    rig.runner.before_step = before_step
    rig.loop.submit(make_request(max_tokens=3))
    rig.listener.wait_ended(R)
    assert told_in_step[1]
    rig.loop.abort(RequestId("d"))
    rig.wait_free()


def test_a_taken_back_reservation_comes_again_and_preempted_tokens_stay_right() -> None:
    rig = build_rig(num_blocks=10)
    rig.loop.start()
    old = make_request("old", prompt_len=16, max_tokens=20)
    young = make_request("young", prompt_len=8, max_tokens=12, leg=Leg.DECODE, seed=3)
    first = expected_tokens(young)[0]

    def transfer() -> None:
        lease = rig.loop.claim(young.request_id).result(DEADLINE_S)
        if not lost_once.is_set():
            return  # too slow: the room will be taken back
        try:
            lease.enter()
        except LeaseClosed:
            return
        rig.runner.write(lease.block_table, 0, list(young.prompt_token_ids))
        lease.exit()
        rig.loop.attach(young.request_id, first)

    def react(event: EngineEvent) -> None:
        if isinstance(event, ReservationLost):
            lost_once.set()
        elif isinstance(event, Reserved):
            service.submit(transfer)

    lost_once = threading.Event()
    service = ThreadPoolExecutor(max_workers=1)
    rig.listener.react = react
    rig.loop.submit(old)
    rig.loop.submit(young)
    for request in (old, young):
        assert rig.listener.wait_ended(request.request_id) is FinishReason.LENGTH
        assert rig.listener.tokens(request.request_id) == expected_tokens(request)
    assert lost_once.is_set()
    rig.wait_free()
    rig.loop.stop()
    service.shutdown()


def test_preempted_sequences_end_as_if_undisturbed() -> None:
    rig = build_rig(num_blocks=12)
    rig.loop.start()
    requests = [make_request(str(i), prompt_len=5 + i, max_tokens=30, seed=i) for i in range(6)]
    for request in requests:
        rig.loop.submit(request)
    for request in requests:
        rig.listener.wait_ended(request.request_id)
        assert rig.listener.tokens(request.request_id) == expected_tokens(request)
    assert rig.loop.stats().preemptions > 0
    rig.wait_free()
    rig.loop.stop()


def test_refusals(rig: Rig) -> None:
    with pytest.raises(RequestTooLong, match="256"):
        rig.loop.submit(make_request(prompt_len=300))
    with pytest.raises(UnknownRequest):
        rig.loop.claim(R).result(DEADLINE_S)
    with pytest.raises(UnknownRequest):
        rig.loop.lease(R).result(DEADLINE_S)
    rig.loop.abort(R)
    rig.loop.attach(R, 3)
    rig.reserve_and_claim(make_request(leg=Leg.DECODE, max_tokens=5))
    rig.loop.attach(R, 3)
    with pytest.raises((NotReserved, UnknownRequest)):
        rig.loop.claim(R).result(DEADLINE_S)
    rig.listener.wait_ended(R)
    rig.wait_free()


def test_a_cancelled_claim_is_not_answered(rig: Rig) -> None:
    held = threading.Event()
    rig.runner.before_step = lambda seqs: wait_until(held.is_set)
    rig.loop.submit(make_request("busy", max_tokens=1))
    future = rig.loop.claim(R)
    assert future.cancel()
    held.set()
    rig.listener.wait_ended(RequestId("busy"))
    rig.wait_free()


@pytest.mark.parametrize("leg", list(Leg))
def test_an_abort_in_any_step_frees_everything(rig: Rig, leg: Leg) -> None:
    for step in range(6):
        request = make_request(f"{leg}{step}", prompt_len=40, max_tokens=50, leg=leg)
        if leg is Leg.DECODE and step:
            rig.reserve_and_claim(request)
            rig.loop.attach(request.request_id, 5)
        else:
            rig.loop.submit(request)
        if step > 1 and leg is not Leg.DECODE:
            kind = ChunkComputed if leg is Leg.PREFILL else TokensOut
            rig.listener.wait_for(kind, request.request_id)
        rig.loop.abort(request.request_id)
        rig.loop.abort(request.request_id)
        rig.wait_free()


def test_steps_teach_the_cost_model() -> None:
    """By a clock that only steps move: which of its terms has a share of what a step took is open,
    and on a busy machine the context of decodes would have all of theirs."""
    step_s, now_s = 1 / 256, [0.0]
    rig = build_rig(clock=lambda: now_s[0])

    def before_step(seqs: list[Sequence]) -> None:
        now_s[0] += step_s

    rig.runner.before_step = before_step
    rig.loop.start()
    rig.loop.submit(make_request(prompt_len=40, max_tokens=6))
    rig.listener.wait_ended(R)
    rig.wait_free()
    stats = rig.loop.stats()
    assert stats.step_seconds == stats.steps * step_s > 0
    assert 0 < abs(stats.step_seconds - stats.step_seconds_predicted) <= stats.step_seconds_error
    assert stats.step_cost["prefill_tokens"] > 0
    assert stats.step_cost["decodes"] > 0
    rig.loop.stop()


def test_a_cancelled_prefill_stops_with_the_chunk_under_way(rig: Rig) -> None:
    """Aborted while its second chunk of 16 tokens computes: there is no third."""

    def before_step(seqs: list[Sequence]) -> None:
        if seqs[0].num_computed_tokens == 16:
            rig.loop.abort(R)

    rig.runner.before_step = before_step
    rig.loop.submit(make_request(prompt_len=200, leg=Leg.PREFILL))
    rig.listener.wait_for(ChunkComputed, R, count=2)
    rig.wait_free()
    assert rig.loop.stats().prompt_tokens_computed == 32
    assert len(rig.listener.of(ChunkComputed, R)) == 2


def test_a_full_queue_refuses_by_the_future_and_by_no_event() -> None:
    rig = build_rig(num_blocks=1000, max_queue_s=0.05)
    rig.runner.before_step = lambda seqs: time.sleep(0.01)  # for 16 tokens
    rig.loop.start()
    requests = [
        make_request(str(i), prompt_len=60, max_tokens=1, leg=Leg.PREFILL) for i in range(40)
    ]
    first = requests.pop()
    rig.loop.submit(first).result(DEADLINE_S)
    rig.listener.wait_for(TokensOut, first.request_id)  # now it knows what a chunk takes
    queued = {request.request_id: rig.loop.submit(request) for request in requests}
    refused = {name for name, future in queued.items() if future.exception(DEADLINE_S)}
    assert 0 < len(refused) < len(requests)
    for name in queued.keys() - refused:
        rig.listener.wait_for(TokensOut, name)
    assert not any(rig.listener.events(name) for name in refused)
    assert rig.loop.stats().prefills_refused == len(refused)
    for name in (*queued, first.request_id):
        rig.loop.abort(name)
    rig.wait_free()
    rig.loop.stop()
