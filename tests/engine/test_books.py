"""Who owns which blocks, and how a leak comes to light without ending the worker."""

import time

import pytest

from engine.block_pool import BlockPool
from engine.books import TURNS_BETWEEN_AUDITS, Books, Owned
from engine.prefix_cache import PrefixCache
from engine.request import BlockId, Leg, RequestId
from engine.scheduler import Scheduler
from tests.engine.loop_rig import build_rig, wait_until
from tests.engine.requests import make_request
from tests.engine.scheduler_drive import Drive


def page_of(drive: Drive) -> list[Owned]:
    return [one._replace(since_ns=0) for one in Books(drive.scheduler).page().owned]


def owned(name: str, state: str, num_blocks: int, num_shared: int = 0) -> Owned:
    return Owned(RequestId(name), state, num_blocks, num_shared, 0)  # type: ignore[arg-type]


def test_promised_then_held_then_in_flight() -> None:
    drive = Drive.build(num_blocks=16)
    size = drive.scheduler.pool.block_size
    seq = drive.submit(make_request("a", prompt_len=2 * size, leg=Leg.DECODE))
    drive.step()
    promised = seq.num_promised_blocks
    assert page_of(drive) == [owned("a", "promised", promised)]
    lease = drive.scheduler.claim(RequestId("a"))
    assert page_of(drive) == [owned("a", "held", promised)]
    lease.enter()
    drive.scheduler.abort(RequestId("a"))
    assert page_of(drive) == [owned("a", "in_flight", promised)]
    lease.exit()
    assert page_of(drive) == []


def test_a_shared_block_counts_for_the_oldest() -> None:
    pool = BlockPool(16, 4)
    drive = Drive(Scheduler(pool, 64, 8, 1000, PrefixCache(pool, b"f")))
    prompt = tuple(range(12))
    drive.submit(make_request("old", prompt=prompt, max_tokens=20))
    drive.step()
    drive.submit(make_request("new", prompt=(*prompt, 77, 78), max_tokens=20))
    drive.step()
    old, new = page_of(drive)
    assert (old.request_id, old.num_shared) == ("old", 0)
    assert (new.request_id, new.num_shared) == ("new", 3)
    assert old.num_blocks + new.num_blocks == pool.ledger().held


def test_samples_are_one_owner() -> None:
    drive = Drive.build(num_blocks=16)
    drive.submit(make_request("a", prompt_len=5, max_tokens=20, others=((), ())))
    drive.step()
    (own,) = page_of(drive)
    assert own.num_blocks == drive.scheduler.pool.ledger().held
    assert own.num_shared > 0


@pytest.mark.parametrize("what", ["block", "promise"])
def test_a_leak_is_counted_while_it_lasts_and_said_once(
    what: str, ledger_violations: list[str]
) -> None:
    drive = Drive.build(num_blocks=16)
    pool, books = drive.scheduler.pool, Books(drive.scheduler)
    drive.submit(make_request("a", max_tokens=20))
    drive.step()
    for _ in range(2 * TURNS_BETWEEN_AUDITS):
        books.audit(is_quiet=False)
    assert books.num_violations == 0
    lost = pool.take(1) if what == "block" else []
    pool.promise(what == "promise")
    for _ in range(3 * TURNS_BETWEEN_AUDITS):
        books.audit(is_quiet=False)
    assert books.num_violations == 3
    (said,) = ledger_violations
    assert {"block": "references", "promise": "promised"}[what] in said
    ledger_violations.clear()
    pool.free(lost)
    pool.withdraw(what == "promise")
    books.audit(is_quiet=True)
    assert books.num_violations == 3


def test_a_worker_lives_on_with_a_leak(ledger_violations: list[str]) -> None:
    """It is in the stats, for the metric; requests are served as before."""
    rig = build_rig()
    rig.loop.start()
    try:
        rig.loop._scheduler.pool.take(1)
        rig.loop.submit(make_request("a", max_tokens=3)).result(5)
        wait_until(lambda: rig.loop.stats().ledger_violations > 0)
        rig.listener.wait_ended(RequestId("a"))
        assert len(rig.listener.tokens(RequestId("a"))) == 3
        page = rig.loop.ledger().result(5)
        assert (page.blocks.held, page.owned) == (1, [])
    finally:
        rig.loop.stop()
    assert rig.loop.failure is None
    assert ledger_violations
    ledger_violations.clear()


def test_a_block_of_two_owners_ends_the_engine() -> None:
    rig = build_rig()
    rig.loop.start()
    rig.loop._scheduler.pool._free.append(BlockId(0))
    rig.loop.submit(make_request("a", max_tokens=1))
    wait_until(lambda: rig.loop.failure is not None)
    rig.loop.stop()
    assert isinstance(rig.loop.failure, AssertionError)


def test_an_audit_costs_next_to_nothing() -> None:
    """Microseconds a turn, with 64 sequences: far below the milliseconds of a step."""
    drive = Drive.build(num_blocks=4000, max_num_seqs=64, token_budget=512)
    for index in range(64):
        drive.submit(make_request(str(index), prompt_len=4, max_tokens=50))
    drive.scheduler.schedule()
    books = Books(drive.scheduler)
    began = time.perf_counter()
    for _ in range(20 * TURNS_BETWEEN_AUDITS):
        books.audit(is_quiet=False)
    assert (time.perf_counter() - began) / (20 * TURNS_BETWEEN_AUDITS) < 50e-6
    assert books.num_violations == 0
