"""The ledger of KV blocks: which ids are free, held or in flight, and how many are promised.

Ids and counts only: no tensors, no sequences, no clock. Engine thread only.

    free ──take──▶ held ──free──▶ free            a sequence's own way
    free ──promise──▶ promised ──redeem──▶ held   no ids until redeemed; cannot fail then
                      promised ──withdraw──▶ free
    held ──leave_in_flight──▶ in flight ──land──▶ free   owned by nobody, a copy is under way

Always free + held + in_flight + promised = num_blocks.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum

from engine.request import BlockId


class _State(IntEnum):
    FREE = 0
    HELD = 1
    IN_FLIGHT = 2


@dataclass(frozen=True, slots=True)
class BlockLedger:
    """Where the blocks of a pool are."""

    free: int
    """Neither used nor spoken for."""
    held: int
    """Referenced by a sequence."""
    in_flight: int
    """Owned by nobody, but a copy is under way."""
    promised: int
    """Taken by no id yet, but spoken for."""


class BlockPool:
    """See the module."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        assert num_blocks > 0, num_blocks
        assert block_size > 0, block_size
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = [BlockId(i) for i in reversed(range(num_blocks))]  # a stack: warm ids first
        self._states = bytearray(num_blocks)  # _State of each id
        self._num_in_flight = 0
        self._num_promised = 0

    @property
    def available(self) -> int:
        """Blocks that may be taken or promised now."""
        return len(self._free) - self._num_promised

    @property
    def num_in_flight(self) -> int:
        return self._num_in_flight

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that so many tokens fill, the last one perhaps in part."""
        return -(-num_tokens // self.block_size)

    def take(self, num_blocks: int) -> list[BlockId]:
        assert 0 <= num_blocks <= self.available, (num_blocks, self.ledger())
        return self._pop(num_blocks)

    def promise(self, num_blocks: int) -> None:
        assert 0 <= num_blocks <= self.available, (num_blocks, self.ledger())
        self._num_promised += num_blocks

    def redeem(self, num_blocks: int) -> list[BlockId]:
        """Turns promised blocks into held ones."""
        self.withdraw(num_blocks)
        return self._pop(num_blocks)

    def withdraw(self, num_blocks: int) -> None:
        """Takes a promise back."""
        assert 0 <= num_blocks <= self._num_promised, (num_blocks, self.ledger())
        self._num_promised -= num_blocks

    def free(self, block_ids: Iterable[BlockId]) -> None:
        for block_id in block_ids:
            self._move(block_id, _State.HELD, _State.FREE)
            self._free.append(block_id)

    def leave_in_flight(self, block_ids: Iterable[BlockId]) -> None:
        """Their sequence is gone, but copies still touch them."""
        for block_id in block_ids:
            self._move(block_id, _State.HELD, _State.IN_FLIGHT)
            self._num_in_flight += 1

    def land(self, block_ids: Iterable[BlockId]) -> None:
        """The copies are done."""
        for block_id in block_ids:
            self._move(block_id, _State.IN_FLIGHT, _State.FREE)
            self._num_in_flight -= 1
            self._free.append(block_id)

    def ledger(self) -> BlockLedger:
        return BlockLedger(
            free=self.available,
            held=self.num_blocks - len(self._free) - self._num_in_flight,
            in_flight=self._num_in_flight,
            promised=self._num_promised,
        )

    def check(self) -> None:
        """Asserts that ids and counts agree; O(num_blocks)."""
        ledger = self.ledger()
        assert self.available >= 0, ledger
        assert self._states.count(_State.FREE) == len(self._free), ledger
        assert self._states.count(_State.IN_FLIGHT) == self._num_in_flight, ledger
        assert self._states.count(_State.HELD) == ledger.held, ledger
        assert len(set(self._free)) == len(self._free), "an id is free twice"
        assert all(self._states[block_id] == _State.FREE for block_id in self._free), ledger

    def _pop(self, num_blocks: int) -> list[BlockId]:
        block_ids = [self._free.pop() for _ in range(num_blocks)]
        for block_id in block_ids:
            self._move(block_id, _State.FREE, _State.HELD)
        return block_ids

    def _move(self, block_id: BlockId, before: _State, after: _State) -> None:
        assert self._states[block_id] == before, (block_id, _State(self._states[block_id]), after)
        self._states[block_id] = after
