"""What is pinned stays, up to the cap, for its time; in any order: test_block_pool.py."""

import pytest

from engine.block_ledger import BlockLedger
from engine.block_pool import BlockPool
from tests.engine.test_block_pool import cached, hashes_of


def test_what_is_pinned_is_never_evicted_until_its_time_is_up() -> None:
    pool = BlockPool(num_blocks=4, block_size=4, max_pinned=3)
    kept = cached(pool, 1, 2)
    assert pool.pin("one", hashes_of(1, 3), until_s=10.0) == (2, 2)
    cached(pool, 2, 2)
    assert (pool.available, pool.ledger().pinned, pool.ledger().cached) == (2, 2, 2)
    pool.free(pool.take(2))
    assert pool.lookup(hashes_of(1, 2)) == kept
    assert pool.lookup(hashes_of(2, 2)) == []
    with pytest.raises(AssertionError):
        pool.take(3)
    pool.share(kept)
    assert (pool.ledger().held, pool.ledger().pinned) == (2, 0)
    pool.free(kept)
    assert pool.ledger().pinned == 2
    pool.expire_pins(9.9)
    assert pool.available == 2
    pool.expire_pins(10.0)
    assert (pool.available, pool.num_pinned, pool.num_pins) == (4, 0, 0)
    assert pool.take(4)
    assert pool.lookup(hashes_of(1, 2)) == []
    assert not pool.unpin("one")


def test_a_pin_waits_for_what_is_not_cached_yet_and_the_cap_holds() -> None:
    pool = BlockPool(num_blocks=8, block_size=4, max_pinned=3)
    assert pool.num_grantable == 5
    assert pool.pin("one", hashes_of(1, 2), until_s=10.0) == (0, 0)
    one = cached(pool, 1, 2)
    assert pool.ledger().pinned == 2
    two = cached(pool, 2, 2)
    assert pool.pin("two", hashes_of(2, 2), until_s=20.0) == (2, 1)  # its beginning
    assert (pool.num_pinned, pool.available) == (3, 5)
    assert pool.unpin("one")
    assert (pool.num_pinned, pool.available) == (2, 6)
    pool.take(6)
    assert pool.lookup(hashes_of(2, 2)) == two
    assert pool.lookup(hashes_of(1, 2)) == []
    assert one
    pool.check()


def test_a_pin_takes_nothing_that_is_promised() -> None:
    pool = BlockPool(num_blocks=4, block_size=4, max_pinned=3)
    cached(pool, 1, 3)
    pool.promise(3)
    assert pool.pin("one", hashes_of(1, 3), until_s=10.0) == (3, 1)
    assert pool.available == 0
    pool.check()
    assert len(pool.redeem(3)) == 3
    assert pool.ledger().pinned == 1


def test_a_pin_again_is_the_last_one_and_two_of_one_prefix_are_two() -> None:
    pool = BlockPool(num_blocks=8, block_size=4, max_pinned=6)
    cached(pool, 1, 4)
    pool.pin("one", hashes_of(1, 4), until_s=5.0)
    pool.pin("one", hashes_of(1, 2), until_s=10.0)
    pool.pin("two", hashes_of(1, 3), until_s=5.0)
    assert (pool.num_pins, pool.num_pinned) == (2, 3)
    pool.expire_pins(5.0)
    assert (pool.num_pins, pool.num_pinned) == (1, 2)
    assert pool.unpin("one")
    assert pool.ledger() == BlockLedger(free=4, cached=4, held=0, in_flight=0, promised=0)
