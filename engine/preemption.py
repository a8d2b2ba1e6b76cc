"""How one sequence gives way for want of blocks when another grows, and how it comes back with what
it had computed.

Pure, as the scheduler that says who and when. A reservation is simply taken back. A running
sequence is computed again later, or its KV goes to host memory if that costs less
(engine/swap_space.py):

    running ──give_way──▶ waiting ──come_back──▶ swapping in ──swapped_in──▶ running
                                  └─ as a new one, behind what the prefix cache still has

Its old blocks are in flight until they are copied out; its new ones are its own from `come_back`
on. Aborted in between, it lets go of them as of any block with a copy under way.
"""

from engine.block_pool import BlockPool
from engine.holdings import Holdings
from engine.queues import Queues
from engine.request import BlockId
from engine.scheduled_batch import ScheduledBatch, SwapIn
from engine.sequence import Sequence, Status
from engine.swap_space import SwapSpace


class Preemption:
    """See the module."""

    def __init__(
        self, pool: BlockPool, queues: Queues, holdings: Holdings, space: SwapSpace
    ) -> None:
        self.num_preemptions = 0
        """Of running sequences."""
        self.space = space
        self._pool = pool
        self._queues = queues
        self._holdings = holdings

    def grow(self, seq: Sequence, batch: ScheduledBatch) -> bool:
        """Room for its last token; False if it has to wait for a block."""
        if self._pool.blocks_for(seq.num_tokens) <= len(seq.block_table):
            return True
        while self._pool.available == 0:
            # Blocks in flight are about to be free: waiting costs less than a victim.
            victim = None if self._pool.num_in_flight else self._queues.youngest(than=seq)
            if victim is None:
                return False
            self.give_way(victim, batch)
        self._holdings.grow(seq)
        return True

    def give_way(self, victim: Sequence, batch: ScheduledBatch) -> None:
        if victim.status is Status.AWAITING_KV:
            batch.lost.append(victim)
        else:
            self.num_preemptions += 1
            victim.was_preempted = True
            lease = self._holdings.lease(victim)
            swap = self.space.begin(victim.request_id, lease, victim.num_computed_tokens)
            victim.swap = swap
            if swap is not None:
                batch.swap_outs.append(swap)
        self._holdings.release(victim)
        self._queues.move(victim, Status.WAITING)

    def keeps_more(self, seq: Sequence, hits: list[BlockId]) -> bool:
        """Host memory has KV of it that the prefix cache has not."""
        swap = seq.swap
        if swap is None or swap.is_lost:
            return False
        return swap.num_tokens > len(hits) * self._holdings.block_size

    def come_back(self, seq: Sequence, hits: list[BlockId], batch: ScheduledBatch) -> None:
        """Into blocks for all its tokens."""
        assert seq.swap is not None, seq.request_id
        self._holdings.admit(seq, hits)
        lease = self._holdings.lease(seq)
        lease.enter()
        seq.swap.is_copying = True
        batch.swap_ins.append(SwapIn(seq.swap, lease, seq.num_computed_tokens))
        self._queues.move(seq, Status.SWAPPING_IN)

    def swapped_in(self, seq: Sequence | None, swap_in: SwapIn, seconds: float | None) -> bool:
        """The copy took so long, or failed (None): then what it lacks is computed again. True: it
        runs from the next step on; False: it is gone."""
        swap = swap_in.swap
        is_whole = seconds is not None and not swap.is_lost
        self.space.copied_in(swap, swap_in.num_tokens, seconds)
        if seq is None or seq.swap is not swap:
            return False
        seq.swap = None
        if is_whole:
            seq.num_computed_tokens = swap.num_tokens
            self._holdings.name_computed(seq)
        self._queues.move(seq, Status.RUNNING)
        return True

    def drop(self, seq: Sequence) -> None:
        """It needs no KV from host memory any more."""
        if seq.swap is not None:
            self.space.drop(seq.swap)
            seq.swap = None
