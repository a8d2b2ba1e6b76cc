"""Who of the waiting comes in, and how: to compute, with a reservation, or with swapped KV.

Pure; a part of the scheduler (engine/scheduler.py says by which rules). Also the limits that no
waiting overcomes.
"""

from engine.block_pool import BlockPool
from engine.errors import InvalidRequest, RequestTooLong
from engine.holdings import Holdings
from engine.preemption import Preemption
from engine.prefill_order import PrefillOrder
from engine.queues import Queues
from engine.request import BlockId, EngineRequest, Leg
from engine.scheduled_batch import ScheduledBatch
from engine.sequence import Sequence, Status
from engine.step_budget import StepBudget


def check_fits(
    request: EngineRequest, pool: BlockPool, max_model_len: int, max_num_seqs: int
) -> None:
    """Raises RequestTooLong if it can never run, InvalidRequest if so many samples never do.
    Constants only: any thread."""
    outputs = (request.output_token_ids, *(one.output_token_ids for one in request.siblings))
    num_tokens = len(request.prompt_token_ids) + max(map(len, outputs))
    if num_tokens >= max_model_len:
        raise RequestTooLong(
            f"{num_tokens} tokens leave no room for another: a sequence has at most "
            f"{max_model_len} here, the pool {pool.num_blocks} blocks of {pool.block_size}"
        )
    # A prefill leg runs one, whose logits the others share.
    if request.siblings and request.leg is not Leg.PREFILL:
        _check_samples(request, pool, max_num_seqs)


def _check_samples(request: EngineRequest, pool: BlockPool, max_num_seqs: int) -> None:
    count, num_prompt = request.num_samples, len(request.prompt_token_ids)
    if count > max_num_seqs:
        raise InvalidRequest(f"n is {count}; at most {max_num_seqs} samples run here at a time")
    shared = num_prompt // pool.block_size
    whole = pool.blocks_for(num_prompt + request.sampling.max_tokens)
    own = min(pool.blocks_for(num_prompt) + 1, whole) - shared
    if shared + own * count > pool.num_grantable:
        raise RequestTooLong(
            f"n is {count}: so many samples of a prompt of {num_prompt} tokens need more than the "
            f"pool's {pool.num_grantable} blocks of {pool.block_size}"
        )


class Admission:
    """See the module."""

    def __init__(
        self,
        pool: BlockPool,
        holdings: Holdings,
        queues: Queues,
        order: PrefillOrder,
        preemption: Preemption,
        max_num_seqs: int,
    ) -> None:
        self._pool = pool
        self._holdings = holdings
        self._queues = queues
        self._order = order
        self._preemption = preemption
        self._max_num_seqs = max_num_seqs

    def let_in(self, under_way: list[Sequence], budget: StepBudget, batch: ScheduledBatch) -> None:
        """Lets waiting ones in, each after those of `under_way` (last first) that go before it."""
        key = self._order.key
        slots = self._max_num_seqs - self._queues.num_slots_taken
        # A block for each that grows, so that newcomers do not at once make somebody give way.
        room = self._pool.available - self._queues.num_growing
        for seq in self._queues.waiting.copy():
            while under_way and key(under_way[-1]) < key(seq):
                start(under_way.pop(), budget, batch)
            # Who only waits for the budget need not search again each step.
            needs_budget = not seq.awaits_transfer and seq.swap is None
            may_come = slots > 0 and (budget.tokens > 0 or not needs_budget)
            hits = self._holdings.find(seq) if may_come else []
            need = self._holdings.cost(seq, hits)
            if seq.num_slots > slots or need > room:
                return
            slots, room = slots - seq.num_slots, room - need
            if seq.awaits_transfer and not self._is_full_hit(seq, hits):
                self._reserve(seq, hits, batch)
            elif self._preemption.keeps_more(seq, hits):
                self._preemption.come_back(seq, hits, batch)
            elif budget.tokens > 0:
                self._run(seq, hits, batch)
                start(seq, budget, batch)

    def _is_full_hit(self, seq: Sequence, hits: list[BlockId]) -> bool:
        """All of its prompt that a cache of whole blocks can have, for one token is left to
        compute: that takes less time than asking another worker."""
        num_missing = seq.num_prompt_tokens - len(hits) * self._pool.block_size
        return bool(hits) and num_missing <= self._pool.block_size

    def _reserve(self, seq: Sequence, hits: list[BlockId], batch: ScheduledBatch) -> None:
        self._holdings.reserve(seq, hits)
        self._queues.move(seq, Status.AWAITING_KV)
        batch.reserved.append(seq)

    def _run(self, seq: Sequence, hits: list[BlockId], batch: ScheduledBatch) -> None:
        self._preemption.drop(seq)
        self._holdings.admit(seq, hits)
        seq.awaits_transfer = False
        self._queues.move(seq, Status.RUNNING)
        if hits:
            batch.hits.append(seq)


def start(seq: Sequence, budget: StepBudget, batch: ScheduledBatch) -> None:
    """It computes as much as the budget grants, perhaps nothing."""
    granted = budget.grant(seq.num_computed_tokens, seq.num_ready_tokens)
    if granted > 0:
        seq.num_scheduled_tokens = granted
        batch.seqs.append(seq)
