"""Prefix hits in the scheduler: what is shared, what is promised, what is computed again."""

from typing import Any

import pytest

from engine.request import EngineRequest, Leg, PrefixHit, Reserved
from engine.sequence import Sequence, Status
from engine.step_events import events_before_step
from tests.engine.requests import make_request
from tests.engine.scheduler_drive import Drive

BODY = tuple(range(100, 116))  # four blocks of 4


def request(
    name: str, prompt: tuple[int, ...], leg: Leg = Leg.LOCAL, **fields: int
) -> EngineRequest:
    return make_request(name, prompt=prompt, leg=leg, **{"max_tokens": 3, **fields})  # type: ignore[arg-type]


def warm(num_blocks: int = 16, **settings: Any) -> Drive:
    """A request with BODY has come and gone."""
    drive = Drive.build(num_blocks=num_blocks, token_budget=32, prefix_caching=True, **settings)
    run(drive, drive.submit(request("warm", (*BODY, 1), max_tokens=1)))
    assert drive.scheduler.pool.ledger().cached == 4
    return drive


def run(drive: Drive, seq: Sequence) -> None:
    while seq.status is not Status.ENDED:
        drive.step()


def hits_of(drive: Drive) -> list[int]:
    return [
        event.num_cached_tokens
        for event in events_before_step(drive.last, 0)
        if isinstance(event, PrefixHit | Reserved)
    ]


def test_computing_begins_behind_the_hit() -> None:
    drive = warm()
    seq = drive.submit(request("r", (*BODY[:14], 7, 8, 9)))
    [computed] = drive.step()
    assert (computed.first_position, computed.num_tokens) == (12, 5)
    assert hits_of(drive) == [12]
    run(drive, seq)
    drive.check_empty()


@pytest.mark.parametrize(("length", "hit"), [(4, 0), (5, 4), (15, 12), (16, 12), (17, 16)])
def test_the_last_token_is_always_computed(length: int, hit: int) -> None:
    drive = warm()
    seq = drive.submit(request("r", (*BODY, 1)[:length]))
    [computed] = drive.step()
    assert computed.first_position == hit
    assert computed.token_id is not None
    assert hits_of(drive) == ([hit] if hit else [])
    run(drive, seq)
    drive.check_empty()


def test_running_sequences_share_blocks() -> None:
    drive = warm()
    seqs = [drive.submit(request(str(i), (*BODY, i), max_tokens=9)) for i in range(3)]
    drive.step()
    assert len({tuple(seq.block_table[:4]) for seq in seqs}) == 1
    assert drive.scheduler.pool.ledger().held == 4 + 3
    drive.abort(seqs[0])
    assert drive.scheduler.pool.ledger().held == 4 + 2
    for seq in seqs[1:]:
        run(drive, seq)
    drive.check_empty()


def test_a_chunk_is_found_before_its_prompt_is_done() -> None:
    drive = Drive.build(token_budget=8, prefix_caching=True)
    first = drive.submit(request("first", (*BODY, 1)))
    drive.step()
    second = drive.submit(request("second", (*BODY, 2)))
    drive.step()
    drive.step()
    assert second.num_cached_tokens == 16
    assert second.block_table[:4] == first.block_table[:4]


def test_salts_do_not_share() -> None:
    drive = warm()
    for salt in ("a", "b", "a"):
        fields = {"prompt": (*BODY, 1), "max_tokens": 1, "cache_salt": salt}
        seq = drive.submit(make_request(f"{salt}{len(drive.seqs)}", **fields))  # type: ignore[arg-type]
        [computed] = drive.step()
        assert computed.first_position == (16 if len(drive.seqs) == 4 else 0)
        run(drive, seq)


def test_no_cache_no_hits() -> None:
    drive = Drive.build(token_budget=32)
    for name in "ab":
        [computed] = (drive.submit(request(name, (*BODY, 1), max_tokens=1)), drive.step())[1]
        assert computed.first_position == 0
    assert drive.scheduler.pool.ledger().cached == 0


def test_eviction_under_pressure_keeps_what_is_held() -> None:
    drive = warm(num_blocks=8)
    sharing = drive.submit(request("sharing", (*BODY[:8], 1), Leg.PREFILL))
    drive.step()
    assert sharing.num_cached_tokens == 8
    other = drive.submit(request("other", tuple(range(19)), max_tokens=1))  # 5 of 5 others
    drive.step()
    assert status(other) is Status.ENDED
    assert status(sharing) is Status.HELD
    again = drive.submit(request("again", (*BODY, 1), max_tokens=1))
    [computed] = drive.step()
    assert computed.first_position == 8  # its end was evicted, its beginning was held
    assert status(again) is Status.ENDED
    drive.abort(sharing)
    drive.check_empty()


def test_a_preempted_sequence_finds_what_it_has_computed() -> None:
    drive = Drive.build(num_blocks=4, token_budget=16, prefix_caching=True)
    old = drive.submit(request("old", (1, 2, 3, 4), max_tokens=6))
    young = drive.submit(request("young", (5, 6, 7), max_tokens=8))
    while not young.was_preempted:
        drive.step()
    run(drive, old)
    [computed] = drive.step()
    assert computed.seq is young
    assert computed.first_position == 4
    assert drive.last.hits == [young]
    assert hits_of(drive) == [], "its own KV is no news"
    run(drive, young)
    drive.check_empty()


def test_a_decode_leg_references_its_hit_and_is_promised_the_rest() -> None:
    drive = warm(num_blocks=10)
    seq = drive.submit(request("d", (*BODY[:8], *range(9)), Leg.DECODE))
    drive.step()
    assert hits_of(drive) == [8]
    ledger = drive.scheduler.pool.ledger()
    assert (ledger.held, ledger.promised) == (2, 3)
    assert drive.scheduler.attach(seq.request_id, 9) is None  # promised, not claimed
    filler = drive.submit(request("filler", tuple(range(19)), max_tokens=1))
    run(drive, filler)  # evicts all that may be evicted
    lease = drive.scheduler.claim(seq.request_id)
    assert len(lease.block_table) == 5
    drive.attach(seq)
    assert [(c.first_position, c.num_tokens) for c in drive.step()] == [(17, 1)]
    run(drive, seq)
    drive.check_empty()


def test_what_is_attached_is_found_and_what_only_came_is_not() -> None:
    drive = Drive.build(prefix_caching=True, token_budget=32)
    first = drive.submit(request("first", (*BODY, 1), Leg.DECODE))
    drive.step()
    drive.start_copy(first)
    drive.end_copy(drive.copies[0])
    second = drive.submit(request("second", (*BODY, 2), Leg.DECODE))
    drive.step()
    assert hits_of(drive) == [0]
    drive.attach(first)
    third = drive.submit(request("third", (*BODY, 3, 4, 5, 6, 7), Leg.DECODE))
    drive.step()
    assert hits_of(drive) == [16]
    for seq in (second, third):
        drive.abort(seq)
    run(drive, first)
    drive.check_empty()


@pytest.mark.parametrize("outputs", [(), (9, 9, 9, 9, 9)])
def test_a_full_hit_needs_no_transfer(outputs: tuple[int, ...]) -> None:
    drive = warm()
    fields = {"max_tokens": 8, "outputs": outputs}
    seq = drive.submit(request("d", (*BODY, 1), Leg.DECODE, **fields))  # type: ignore[arg-type]
    [computed] = drive.step()
    assert (drive.last.reserved, drive.last.hits) == ([], [seq])
    assert (computed.first_position, computed.num_tokens) == (16, 1 + len(outputs))
    run(drive, seq)
    drive.check_empty()


def test_a_short_prompt_is_no_full_hit() -> None:
    drive = warm()
    seq = drive.submit(request("d", BODY[:4], Leg.DECODE))
    drive.step()
    assert drive.last.reserved == [seq]


def test_copies_out_of_a_shared_prefix_keep_it() -> None:
    """A prefill leg is released in mid copy: its blocks, found by others meanwhile or not, are
    neither evicted nor written."""
    drive = warm(num_blocks=6)
    leg = drive.submit(request("leg", (*BODY, 1), Leg.PREFILL))
    drive.start_copy(leg)
    drive.step()
    drive.abort(leg)
    assert drive.scheduler.pool.ledger().in_flight == 5
    seq = drive.submit(request("r", (*BODY, 2), max_tokens=1))
    big = drive.submit(request("big", tuple(range(8)), max_tokens=1))
    drive.step()
    assert status(seq) is Status.ENDED
    assert status(big) is Status.WAITING  # only one block is not being copied
    drive.end_copy(drive.copies[0])
    run(drive, big)
    drive.check_empty()


def status(seq: Sequence) -> Status:
    """For the type checker, which takes a status it has seen for lasting."""
    return seq.status
