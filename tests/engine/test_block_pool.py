from itertools import chain

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from engine.block_ledger import BlockLedger
from engine.block_pool import BlockPool
from engine.request import BlockId
from runtime.block_hash import BlockHash, block_hash, root_hash


def hashes_of(key: int, num_blocks: int) -> list[BlockHash]:
    """Of a prompt whose blocks all hold `key`."""
    hashes = [root_hash(b"")]
    for _ in range(num_blocks):
        hashes.append(block_hash(hashes[-1], [key]))
    return hashes[1:]


def cached(pool: BlockPool, key: int, num_blocks: int) -> list[BlockId]:
    """A prompt that came and went."""
    block_ids = pool.take(num_blocks)
    for block_id, name in zip(block_ids, hashes_of(key, num_blocks), strict=True):
        pool.cache(block_id, name)
    pool.free(block_ids)
    return block_ids


def test_each_way_through_the_ledger() -> None:
    pool = BlockPool(num_blocks=8, block_size=4)
    held = pool.take(2)
    pool.promise(3)
    assert pool.ledger() == BlockLedger(free=3, cached=0, held=2, in_flight=0, promised=3)
    redeemed = pool.redeem(2)
    pool.withdraw(1)
    pool.leave_in_flight(redeemed)
    assert pool.ledger() == BlockLedger(free=4, cached=0, held=2, in_flight=2, promised=0)
    pool.land(redeemed)
    pool.free(held)
    assert pool.ledger() == BlockLedger(free=8, cached=0, held=0, in_flight=0, promised=0)
    pool.check()


def test_blocks_for_rounds_up() -> None:
    pool = BlockPool(num_blocks=1, block_size=4)
    assert [pool.blocks_for(n) for n in (0, 1, 4, 5, 8)] == [0, 1, 1, 2, 2]


def test_promised_blocks_cannot_be_taken() -> None:
    pool = BlockPool(num_blocks=4, block_size=4)
    pool.promise(3)
    assert pool.available == 1
    with pytest.raises(AssertionError):
        pool.take(2)
    with pytest.raises(AssertionError):
        pool.promise(2)
    assert len(pool.redeem(3)) == 3


def test_double_free_is_caught() -> None:
    pool = BlockPool(num_blocks=4, block_size=4)
    block_ids = pool.take(2)
    pool.free(block_ids)
    with pytest.raises(AssertionError):
        pool.free(block_ids)


def test_a_block_in_flight_is_not_free() -> None:
    pool = BlockPool(num_blocks=1, block_size=4)
    block_ids = pool.take(1)
    pool.leave_in_flight(block_ids)
    assert pool.available == 0
    with pytest.raises(AssertionError):
        pool.free(block_ids)
    pool.land(block_ids)
    with pytest.raises(AssertionError):
        pool.land(block_ids)


def test_the_longest_cached_prefix_is_found_and_shared() -> None:
    pool = BlockPool(num_blocks=8, block_size=4)
    block_ids = cached(pool, 1, 3)
    assert pool.ledger() == BlockLedger(free=5, cached=3, held=0, in_flight=0, promised=0)
    assert pool.lookup(hashes_of(1, 6)) == block_ids
    assert pool.lookup(hashes_of(2, 6)) == []
    assert pool.num_evictable(block_ids) == 3
    pool.share(block_ids[:2])
    assert pool.num_evictable(block_ids) == 1
    pool.share(block_ids[:2])
    pool.free(block_ids[:2])
    assert pool.ledger() == BlockLedger(free=5, cached=1, held=2, in_flight=0, promised=0)
    pool.free(block_ids[:2])
    assert pool.ledger().cached == 3
    with pytest.raises(AssertionError):
        pool.free(block_ids[:2])


def test_the_least_recently_used_goes_first_and_of_a_prompt_its_end() -> None:
    pool = BlockPool(num_blocks=4, block_size=4)
    old, young = cached(pool, 1, 2), cached(pool, 2, 2)
    pool.share(old)
    pool.free(old)  # used again: now the other one is older
    assert pool.take(1) == young[1:]
    assert pool.lookup(hashes_of(2, 2)) == young[:1]
    assert pool.take(2) == [young[0], old[1]]
    assert pool.lookup(hashes_of(1, 2)) == old[:1]
    assert pool.take(1) == old[:1]
    assert pool.lookup(hashes_of(1, 2)) == []
    pool.check()


def test_free_blocks_go_before_cached_ones_and_promises_count_against_both() -> None:
    pool = BlockPool(num_blocks=4, block_size=4)
    block_ids = cached(pool, 1, 2)
    pool.promise(3)
    assert pool.ledger() == BlockLedger(free=0, cached=1, held=0, in_flight=0, promised=3)
    assert pool.available == 1
    assert pool.lookup(hashes_of(1, 2)) == block_ids  # still there, until the promise is redeemed
    with pytest.raises(AssertionError):
        pool.share(block_ids)  # but spoken for
    pool.share(block_ids[:1])
    assert pool.available == 0
    assert block_ids[0] not in pool.redeem(3)
    assert pool.lookup(hashes_of(1, 2)) == block_ids[:1]


def test_what_is_copied_is_not_evicted_but_may_be_shared() -> None:
    pool = BlockPool(num_blocks=2, block_size=4)
    (block_id,) = block_ids = pool.take(1)
    pool.cache(block_id, hashes_of(1, 1)[0])
    pool.leave_in_flight(block_ids)
    assert pool.ledger() == BlockLedger(free=1, cached=0, held=0, in_flight=1, promised=0)
    assert pool.take(1) != block_ids
    assert pool.lookup(hashes_of(1, 1)) == block_ids
    assert pool.num_evictable(block_ids) == 0
    pool.share(block_ids)
    assert pool.ledger().held == 2
    pool.land(block_ids)
    pool.free(block_ids)
    assert pool.ledger() == BlockLedger(free=0, cached=1, held=1, in_flight=0, promised=0)


def test_a_second_copy_of_the_same_kv_is_not_cached() -> None:
    pool = BlockPool(num_blocks=4, block_size=4)
    first, second = pool.take(1), pool.take(1)
    for block_id in (*first, *second):
        pool.cache(block_id, hashes_of(1, 1)[0])
    pool.free(second)
    assert pool.ledger().cached == 0
    pool.free(first)
    assert pool.ledger().cached == 1
    assert pool.lookup(hashes_of(1, 1)) == first


class AnyOrder(RuleBasedStateMachine):
    """Whatever is done in whatever order, no id has two owners who write, the ledger sums, and
    what is found is what was cached."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(num_blocks=12, block_size=4, max_pinned=4)
        self.now_s = 0.0
        self.tables: list[list[BlockId]] = []
        self.in_flight: list[list[BlockId]] = []
        self.promised = 0
        self.contents: dict[BlockId, BlockHash] = {}

    def new(self, block_ids: list[BlockId]) -> list[BlockId]:
        """Will be written: nobody else may use them."""
        used = set(chain.from_iterable(self.tables + self.in_flight))
        assert used.isdisjoint(block_ids)
        for block_id in block_ids:
            self.contents.pop(block_id, None)
        return block_ids

    @rule(key=st.integers(0, 3), n=st.integers(0, 8), is_whole=st.booleans())
    def come(self, key: int, n: int, is_whole: bool) -> None:
        hashes = hashes_of(key, n)
        hits = self.pool.lookup(hashes)
        assert [self.contents[block_id] for block_id in hits] == hashes[: len(hits)]
        if n - len(hits) + self.pool.num_evictable(hits) > self.pool.available:
            return
        self.pool.share(hits)
        table = hits + self.new(self.pool.take(n - len(hits)))
        self.tables.append(table)
        if is_whole:
            for block_id, name in zip(table, hashes, strict=True):
                self.contents[block_id] = name
                self.pool.cache(block_id, name)

    @rule(n=st.integers(0, 12))
    def promise(self, n: int) -> None:
        n = min(n, self.pool.available)
        self.pool.promise(n)
        self.promised += n

    @rule(n=st.integers(0, 12), keep=st.booleans())
    def end_promise(self, n: int, keep: bool) -> None:
        n = min(n, self.promised)
        self.promised -= n
        if keep:
            self.tables.append(self.new(self.pool.redeem(n)))
        else:
            self.pool.withdraw(n)

    @rule(n=st.integers(0, 12), copying=st.booleans())
    def let_go(self, n: int, copying: bool) -> None:
        if not self.tables:
            return
        gone = self.tables.pop(n % len(self.tables))
        if copying:
            self.pool.leave_in_flight(gone)
            self.in_flight.append(gone)
        else:
            self.pool.free(gone)

    @rule(key=st.integers(0, 3), n=st.integers(0, 8), seconds=st.floats(0, 5))
    def pin(self, key: int, n: int, seconds: float) -> None:
        before = set(self.pool.lookup(hashes_of(key, n)))
        num_cached, num_pinned = self.pool.pin(str(key), hashes_of(key, n), self.now_s + seconds)
        assert len(before) <= num_cached <= n
        assert num_pinned <= min(num_cached, self.pool.max_pinned)

    @rule(key=st.integers(0, 3))
    def unpin(self, key: int) -> None:
        self.pool.unpin(str(key))
        assert not self.pool.unpin(str(key))

    @rule(seconds=st.floats(0, 3))
    def time_passes(self, seconds: float) -> None:
        self.now_s += seconds
        self.pool.expire_pins(self.now_s)

    @rule()
    def all_pins_end(self) -> None:
        """Then it is as if there had been none."""
        self.time_passes(5.1)
        assert self.pool.num_pins == self.pool.num_pinned == self.pool.ledger().pinned == 0

    @rule(n=st.integers(0, 12))
    def land(self, n: int) -> None:
        if self.in_flight:
            self.pool.land(self.in_flight.pop(n % len(self.in_flight)))

    @invariant()
    def sums(self) -> None:
        self.pool.check()
        held = set(chain.from_iterable(self.tables))
        in_flight = set(chain.from_iterable(self.in_flight)) - held
        ledger = self.pool.ledger()
        assert (ledger.held, ledger.in_flight) == (len(held), len(in_flight))
        assert ledger.promised == self.promised
        assert ledger.unused == 12 - len(held) - len(in_flight) - self.promised
        assert ledger.unused - ledger.pinned == self.pool.available
        if not held and not in_flight and not self.promised:
            assert self.pool.available >= self.pool.num_grantable  # whatever is pinned
        assert min(ledger.free, ledger.cached) >= 0


AnyOrder.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestAnyOrder = AnyOrder.TestCase
