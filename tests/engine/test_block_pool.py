import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from engine.block_pool import BlockLedger, BlockPool
from engine.request import BlockId


def test_each_way_through_the_ledger() -> None:
    pool = BlockPool(num_blocks=8, block_size=4)
    held = pool.take(2)
    pool.promise(3)
    assert pool.ledger() == BlockLedger(free=3, held=2, in_flight=0, promised=3)
    redeemed = pool.redeem(2)
    pool.withdraw(1)
    pool.leave_in_flight(redeemed)
    assert pool.ledger() == BlockLedger(free=4, held=2, in_flight=2, promised=0)
    pool.land(redeemed)
    pool.free(held)
    assert pool.ledger() == BlockLedger(free=8, held=0, in_flight=0, promised=0)
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


class AnyOrder(RuleBasedStateMachine):
    """Whatever is done in whatever order, no id has two owners and the ledger sums."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(num_blocks=12, block_size=4)
        self.held: list[BlockId] = []
        self.in_flight: list[BlockId] = []
        self.promised = 0

    @rule(n=st.integers(0, 12))
    def take(self, n: int) -> None:
        self.held += self.pool.take(min(n, self.pool.available))

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
            self.held += self.pool.redeem(n)
        else:
            self.pool.withdraw(n)

    @rule(n=st.integers(0, 12), copying=st.booleans())
    def let_go(self, n: int, copying: bool) -> None:
        gone, self.held = self.held[:n], self.held[n:]
        if copying:
            self.pool.leave_in_flight(gone)
            self.in_flight += gone
        else:
            self.pool.free(gone)

    @rule(n=st.integers(0, 12))
    def land(self, n: int) -> None:
        gone, self.in_flight = self.in_flight[:n], self.in_flight[n:]
        self.pool.land(gone)

    @invariant()
    def sums(self) -> None:
        self.pool.check()
        owned = self.held + self.in_flight
        assert len(set(owned)) == len(owned)
        assert self.pool.ledger() == BlockLedger(
            free=12 - len(owned) - self.promised,
            held=len(self.held),
            in_flight=len(self.in_flight),
            promised=self.promised,
        )


AnyOrder.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestAnyOrder = AnyOrder.TestCase
