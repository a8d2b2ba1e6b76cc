"""Which sequence computes how many tokens in the next step, and who holds, waits or gives way.

Pure: no tensors, no clock, no threads; the engine thread calls it between steps. Age is the order
of arrival. One step, under one token budget (the algorithm is Sarathi-Serve's, arXiv 2403.02310):

1. Every running sequence with one uncomputed token takes it, oldest first: decodes never wait for
   a prefill. One that needs a block the pool has not got makes the youngest sequence give way.
2. Sequences with more to compute (prompts, resumed tails), running or waiting, take what is left in
   their order (engine/prefill_order.py); beside decodes that is as much as `StepPace` allows
   (engine/step_budget.py).
3. Waiting ones come in as far as room and slots go. What was preempted comes before what is new.
   Nobody overtakes for want of room; only a prompt that waits for the budget alone is overtaken,
   by reservations, and its room stays spoken for.

Blocks: a sequence comes in with blocks for all its present tokens, so no prefill stops half way,
and only sampled tokens make it grow. The first of them may be cached ones, which it shares: what
they hold is not computed. A `Leg.DECODE` request comes in as its cached prefix and a promise of the
other blocks and one of headroom; `claim` redeems it, `attach` makes it run. One that lacks no more
than a block of its prompt computes that here and needs no transfer. Those that give way are the
youngest of the running and the reserved, and are always younger than the one that needs room, so
the oldest always progresses; prefill legs never give way, for others copy out of their blocks.
What a victim had computed is kept in host memory if that costs less than computing it again
(engine/swap_space.py); it comes back into new blocks before the sequence runs.
Whoever finds nobody to give way keeps what it has and waits for another step.

Several samples of a request come in as one: slots and blocks of all are counted when the first is
let in, and the others fork from it when its prompt is whole (engine/fork.py).
"""

from collections.abc import Mapping
from itertools import chain
from types import MappingProxyType

from engine.admission import Admission, check_fits, start
from engine.block_pool import BlockPool
from engine.errors import NotReserved, UnknownRequest
from engine.fork import Forks
from engine.holdings import Holdings
from engine.kv_lease import KVLease
from engine.preemption import Preemption
from engine.prefill_order import PrefillOrder, PrefillPolicy
from engine.prefix_cache import PrefixCache
from engine.queue_bound import QueueBound
from engine.queues import Queues
from engine.request import EngineRequest, FinishReason, RequestId
from engine.scheduled_batch import Computed, ScheduledBatch, SwapIn
from engine.sequence import Sequence, Status
from engine.step_budget import StepPace
from engine.step_cost import StepCost
from engine.swap_space import SwapSpace


class Scheduler:
    """See the module. `cache` None: no prefix caching."""

    def __init__(
        self,
        pool: BlockPool,
        token_budget: int,
        max_num_seqs: int,
        max_model_len: int,
        cache: PrefixCache | None = None,
        tpot_slo_s: float | None = None,
        prefill_policy: PrefillPolicy = "fcfs",
        max_queue_s: float | None = None,
        swap_nbytes: int = 0,
        token_nbytes: int = 1,
    ) -> None:
        self.pool = pool
        self.holdings = Holdings(pool, cache)
        self.holdings.on_drained = self.drained
        self.token_budget = token_budget
        self.cost = StepCost()
        """Whoever runs the steps feeds it."""
        self.max_num_seqs = min(max_num_seqs, token_budget)  # each decode needs a token a step
        # The oldest can always grow to its end, alone in the pool.
        self.max_model_len = min(max_model_len, pool.num_grantable * pool.block_size)
        self.queue_bound = QueueBound(self.cost, token_budget, max_queue_s)
        self._pace = StepPace(self.cost, tpot_slo_s)
        self._order = PrefillOrder(prefill_policy)
        self._seqs: dict[RequestId, list[Sequence]] = {}  # its samples that have not ended
        self._queues = Queues(self._order)
        space = SwapSpace(self.cost, token_budget, swap_nbytes, token_nbytes)
        self.preemption = Preemption(pool, self._queues, self.holdings, space)
        self.forks = Forks(self._queues, self.holdings, pool.num_grantable)
        self._admission = Admission(
            pool, self.holdings, self._queues, self._order, self.preemption, self.max_num_seqs
        )

    # ── requests come and go ──

    def check_fits(self, request: EngineRequest) -> None:
        """Raises RequestTooLong if it can never run, InvalidRequest if so many samples never do.
        Reads constants only: any thread."""
        check_fits(request, self.pool, self.max_model_len, self.max_num_seqs)

    def add(self, seq: Sequence) -> None:
        """The leader of some samples. Raises QueueFull for a prefill leg that would wait too
        long."""
        assert seq.request_id not in self._seqs, seq.request_id
        self._order.enter(seq, len(self.holdings.find(seq)) * self.pool.block_size)
        if seq.is_prefill_leg:
            key = self._order.key
            queued = self._queues.to_compute()
            self.queue_bound.check(other for other in queued if key(other) < key(seq))
        self._seqs[seq.request_id] = [seq, *seq.forks]
        self._queues.join(seq, Status.WAITING)
        for late in self.forks.split_off(seq):
            self._order.enter(late, 0)
            self._queues.join(late, Status.WAITING)

    def abort(self, request_id: RequestId) -> None:
        """Any leg, any state, all samples, idempotent: it holds nothing afterwards."""
        for seq in self.samples(request_id):
            self._end(seq)

    def finish(self, request_id: RequestId, sample: int) -> Sequence | None:
        """This sample ends here. None: it is not there, or others are still to fork from it."""
        for seq in self.samples(request_id):
            if seq.request.sample == sample and not seq.forks and seq.status is not Status.FORKING:
                seq.finish_reason = FinishReason.STOP
                self._end(seq)
                return seq
        return None

    # ── the KV comes from elsewhere ──

    def claim(self, request_id: RequestId) -> KVLease:
        """Turns a promise into blocks. Raises UnknownRequest, NotReserved."""
        seq = self._get(request_id)
        if seq.status is not Status.AWAITING_KV or not seq.awaits_transfer:
            raise NotReserved(f"{request_id} is {seq.status.value}")
        return self.holdings.claim(seq)

    def lease(self, request_id: RequestId) -> KVLease:
        """The right to copy, one per stay in the pool. Raises UnknownRequest."""
        return self.holdings.lease(self._get(request_id))

    def attach(
        self,
        request_id: RequestId,
        first_token_id: int | None,
        others: Mapping[int, int] = MappingProxyType({}),
    ) -> Sequence | None:
        """The prompt's KV is in the claimed blocks: it runs, from the next step on, or has
        finished with that token. None if it is gone or its blocks are. Delivered outputs stand, and
        a first token beside them is ignored; with neither, the last prompt token is computed again
        and sampled from. `others`: first tokens of the other samples, which fork with them, by
        sample; all or none."""
        seq = next(iter(self.samples(request_id)), None)
        is_claimed = seq is not None and not seq.num_promised_blocks
        if seq is None or seq.status is not Status.AWAITING_KV or not is_claimed:
            return None
        if not seq.awaits_transfer:
            return None
        if first_token_id is not None and not seq.num_output_tokens:
            seq.append(first_token_id)
            for fork in seq.forks if seq.draws_forks else ():
                fork.append(others[fork.request.sample])
        seq.awaits_transfer = False
        seq.num_computed_tokens = min(seq.num_prompt_tokens, seq.num_tokens - 1)
        self.holdings.name_computed(seq)
        self._queues.move(seq, Status.RUNNING)
        self._settle(seq)
        return seq

    def compute_rest(self, request_id: RequestId, num_tokens: int) -> Sequence | None:
        """No more KV comes for it: [0, num_tokens) of its prompt is in the claimed blocks, and it
        computes the rest itself, as soon as nobody copies into them any more. Returned if it has
        blocks; one that waits for room comes in like a local request."""
        seq = next(iter(self.samples(request_id)), None)
        if seq is None or not seq.awaits_transfer:
            return None
        if seq.status is not Status.AWAITING_KV:
            self._queues.leave(seq)
            seq.awaits_transfer = False
            self._queues.join(seq, seq.status)
            return None
        # What came went into claimed blocks: into others, if its room was lost and found since.
        installed = 0 if seq.num_promised_blocks else min(num_tokens, seq.num_tokens - 1)
        self.holdings.claim(seq)
        seq.awaits_transfer = False
        seq.num_computed_tokens = max(seq.num_computed_tokens, installed)
        self.holdings.name_computed(seq)
        if self.holdings.end_lease(seq):
            self._queues.move(seq, Status.RUNNING)
        return seq

    def drained(self, lease: KVLease) -> None:
        """See Holdings.drained."""
        if (seq := self.holdings.drained(lease)) is not None:
            self._queues.move(seq, Status.RUNNING)

    # ── the KV comes back from host memory ──

    def swapped_in(self, swap_in: SwapIn, seconds: float | None) -> bool:
        """See Preemption.swapped_in."""
        samples = self.samples(swap_in.swap.request_id)
        seq = next((seq for seq in samples if seq.swap is swap_in.swap), None)
        return self.preemption.swapped_in(seq, swap_in, seconds)

    # ── steps ──

    def schedule(self) -> ScheduledBatch:
        batch = ScheduledBatch(seqs=[], lost=[], reserved=[], hits=[])
        for seq in self._queues.running.copy():
            is_running = seq.status is Status.RUNNING  # nobody older took its blocks in this loop
            is_decode = seq.num_uncomputed_tokens == seq.num_ready_tokens == 1
            if is_running and is_decode and self.preemption.grow(seq, batch):
                seq.num_scheduled_tokens = 1
                batch.seqs.append(seq)
        under_way = [seq for seq in self._queues.running if seq.num_uncomputed_tokens > 1]
        if not (under_way or self._queues.waiting):
            return batch
        budget = self._pace.budget(self.token_budget - len(batch.seqs), batch.seqs)
        under_way.sort(key=self._order.key, reverse=True)
        if self._queues.waiting:
            self._admission.let_in(under_way, budget, batch)
        while under_way:
            start(under_way.pop(), budget, batch)
        return batch

    def update(self, batch: ScheduledBatch, token_ids: list[int]) -> list[Computed]:
        """The step is done; `token_ids` has one for each sequence that samples, in the order of
        `scheduled_batch.sampling`."""
        sampled = iter(token_ids)
        computed = []
        for seq in batch.seqs:
            first_position, num_tokens = seq.num_computed_tokens, seq.num_scheduled_tokens
            drawn = [(one, next(sampled)) for one in seq.drawn] if seq.samples_next else []
            seq.num_computed_tokens += num_tokens
            seq.num_scheduled_tokens = 0
            self.holdings.name_computed(seq)
            if not drawn:
                computed.append(Computed(seq, first_position, num_tokens, None))
            for one, token_id in drawn:
                one.append(token_id)
                computed.append(Computed(one, first_position, num_tokens, token_id))
                first_position, num_tokens = first_position + num_tokens, 0
            if seq.is_prefill_leg:
                if seq.num_computed_tokens == seq.num_prompt_tokens:
                    self._queues.move(seq, Status.HELD)
            else:
                self._settle(seq)
        assert next(sampled, None) is None, "more tokens than sequences that sample"
        return computed

    @property
    def num_waiting(self) -> int:
        return len(self._queues.waiting)

    @property
    def num_running(self) -> int:
        return len(self._queues.running)

    @property
    def num_awaiting_kv(self) -> int:
        return len(self._queues.awaiting_kv)

    @property
    def queue_s(self) -> float:
        """How long a prompt that came now would wait for the others, by prediction."""
        return self.queue_bound.wait_s(self._queues.to_compute())

    @property
    def seqs(self) -> list[Sequence]:
        """All that have not ended, prefill legs that hold their KV included."""
        return list(chain.from_iterable(self._seqs.values()))

    def samples(self, request_id: RequestId) -> list[Sequence]:
        """Those of a request that have not ended; the leader first."""
        return list(self._seqs.get(request_id, ()))

    def check(self) -> None:
        """Asserts that every block is where its sequence or lease says; O(num_blocks)."""
        self.holdings.check(self.seqs)

    def _end(self, seq: Sequence) -> None:
        self.preemption.drop(seq)
        self.holdings.release(seq)
        self._queues.move(seq, Status.ENDED)
        samples = self._seqs[seq.request_id]
        samples.remove(seq)
        if not samples:
            del self._seqs[seq.request_id]

    def _settle(self, seq: Sequence) -> None:
        """It has computed or received something: the others fork when they can."""
        if seq.forks and seq.num_computed_tokens >= seq.num_prompt_tokens:
            for fork in self.forks.fork(seq):
                if fork.finish_reason is not None:
                    self._end(fork)
        if seq.finish_reason is not None:
            self._end(seq)

    def _get(self, request_id: RequestId) -> Sequence:
        """Its leader."""
        for seq in self.samples(request_id):
            return seq
        raise UnknownRequest(request_id)
