"""Drives a scheduler as an engine and its services would, and checks it after every move."""

import itertools
from dataclasses import astuple, dataclass, field

from engine.block_pool import BlockPool
from engine.books import Books
from engine.errors import NotReserved, UnknownRequest
from engine.fork import sequences
from engine.kv_lease import KVLease
from engine.prefill_order import PrefillPolicy
from engine.prefix_cache import PrefixCache
from engine.request import BlockId, EngineRequest, FinishReason, Leg
from engine.scheduled_batch import Computed, ScheduledBatch, SwapIn, sampling
from engine.scheduler import Scheduler
from engine.sequence import Sequence, Status
from engine.step_cost import StepWork
from engine.swap_space import Swap

SampleId = str
"""Of the first sample of a request its name; of the others that and the sample."""


def sample_id(seq: Sequence) -> SampleId:
    sample = seq.request.sample
    return f"{seq.request_id}#{sample}" if sample else seq.request_id


@dataclass
class Copy:
    """A copy under way under a lease."""

    lease: KVLease


@dataclass
class Drive:
    """A scheduler, the sequences it was given and what became of them."""

    scheduler: Scheduler
    seqs: dict[SampleId, Sequence] = field(default_factory=dict)
    """In the order in which they came."""
    ended: dict[SampleId, FinishReason | None] = field(default_factory=dict)
    """None: aborted or released."""
    copies: list[Copy] = field(default_factory=list)
    kv: dict[tuple[BlockId, int], int] = field(default_factory=dict)
    """What computing and transfers wrote, by (block, offset): the token id."""
    last: ScheduledBatch = field(default_factory=lambda: ScheduledBatch([], [], [], []))
    num_submitted: int = 0
    """Refused ones included."""
    swaps: list[tuple[Swap, SwapIn | None]] = field(default_factory=list)
    """Copies to host memory and back that are under way, in the order in which they end."""
    swapped: dict[Swap, list[int]] = field(default_factory=dict)
    """What was copied out, by token ids."""
    work: StepWork = field(default_factory=StepWork)
    """Of the last step."""

    @classmethod
    def build(
        cls,
        num_blocks: int = 16,
        block_size: int = 4,
        token_budget: int = 8,
        max_num_seqs: int = 8,
        max_model_len: int = 1000,
        prefix_caching: bool = False,
        tpot_slo_s: float | None = None,
        prefill_policy: PrefillPolicy = "fcfs",
        max_queue_s: float | None = None,
        swap_tokens: int = 0,
    ) -> "Drive":
        """`swap_tokens`: room for so many in host memory."""
        pool = BlockPool(num_blocks, block_size)
        cache = PrefixCache(pool, b"fingerprint") if prefix_caching else None
        return cls(
            Scheduler(
                pool,
                token_budget,
                max_num_seqs,
                max_model_len,
                cache,
                tpot_slo_s,
                prefill_policy,
                max_queue_s,
                swap_tokens,
            )
        )

    def submit(self, request: EngineRequest) -> Sequence:
        self.scheduler.check_fits(request)
        arrivals = itertools.count(self.num_submitted)
        seq = sequences(request, arrivals, self.scheduler.max_model_len)
        samples = [seq, *seq.forks]
        self.num_submitted += len(samples)
        self.scheduler.add(seq)
        self.seqs |= {sample_id(one): one for one in samples}
        self.check()
        return seq

    def step(self) -> list[Computed]:
        """One step with token id 9 for every sample."""
        before = [s for s in self.seqs.values() if s.status is Status.RUNNING]
        decodes = [s for s in before if s.num_uncomputed_tokens == s.num_ready_tokens == 1]
        self.last = batch = self.scheduler.schedule()
        self._begin_swaps(batch)
        self._judge(batch, decodes)
        self.work = batch.work()
        for seq in batch.seqs:
            self._write(seq, seq.num_computed_tokens, seq.num_scheduled_tokens)
        computed = self.scheduler.update(batch, [9] * len(sampling(batch.seqs)))
        self._copy_blocks()
        for done in computed:
            if done.seq.status is Status.ENDED:
                self._ends(sample_id(done.seq), done.seq.finish_reason)
        self.check()
        return computed

    def _copy_blocks(self) -> None:
        for source, target in self.scheduler.forks.take_copies():
            for offset in range(self.scheduler.pool.block_size):
                if (source, offset) in self.kv:
                    self.kv[target, offset] = self.kv[source, offset]

    def _begin_swaps(self, batch: ScheduledBatch) -> None:
        """Before the step writes any block; the copies themselves may take longer."""
        for swap in batch.swap_outs:
            slots = self._slots(swap.lease.block_table, 0, swap.num_tokens)
            self.swapped[swap] = [self.kv[slot] for slot in slots]
            self.swaps.append((swap, None))
        self.swaps += [(swap_in.swap, swap_in) for swap_in in batch.swap_ins]

    def end_swap(self, *, is_lost: bool = False) -> None:
        """The oldest copy under way ends: the copier does one after the other."""
        if not self.swaps:
            return
        swap, swap_in = self.swaps.pop(0)
        seconds = None if is_lost else 0.001
        if swap_in is None:
            swap.lease.exit()
            self.scheduler.preemption.space.copied_out(swap, seconds)
        else:
            first, count = swap_in.first_token, swap_in.num_tokens
            if not is_lost:
                slots = self._slots(swap_in.lease.block_table, first, count)
                self.kv.update(zip(slots, self.swapped[swap][first:], strict=True))
            swap_in.lease.exit()
            self.scheduler.swapped_in(swap_in, seconds)
        self.check()

    def _slots(
        self, block_table: list[BlockId], first: int, num_tokens: int
    ) -> list[tuple[BlockId, int]]:
        size = self.scheduler.pool.block_size
        positions = range(first, first + num_tokens)
        return [(block_table[position // size], position % size) for position in positions]

    def _judge(self, batch: ScheduledBatch, decodes: list[Sequence]) -> None:
        assert sum(s.num_scheduled_tokens for s in batch.seqs) <= self.scheduler.token_budget
        assert len(batch.seqs) == len(set(batch.seqs)) <= self.scheduler.max_num_seqs
        size = self.scheduler.pool.block_size
        for seq in batch.seqs:
            reach = seq.num_computed_tokens + seq.num_scheduled_tokens
            assert seq.num_scheduled_tokens > 0
            assert not (seq.samples_next and any(one.awaits_grammar for one in seq.drawn))
            assert len(seq.block_table) * size >= reach
            assert list(seq.block_ids()) == seq.block_table
        for seq in decodes:  # only want of a block pauses a decode
            lacks_block = len(seq.block_table) * size < seq.num_tokens
            assert seq in batch.seqs or lacks_block or seq.status is Status.WAITING

    def _ends(self, name: SampleId, reason: FinishReason | None) -> None:
        assert name not in self.ended, "a sample ends once"
        self.ended[name] = reason

    def abort(self, seq: Sequence) -> None:
        """All samples of its request."""
        for one in self.scheduler.samples(seq.request_id):
            self._ends(sample_id(one), None)
        self.scheduler.abort(seq.request_id)
        assert not seq.block_table
        self.check()

    def start_copy(self, seq: Sequence) -> None:
        """Claims a decode leg's blocks, or leases a prefill leg's, and enters a copy."""
        try:
            if seq.request.leg is Leg.DECODE:
                lease = self.scheduler.claim(seq.request_id)
            else:
                lease = self.scheduler.lease(seq.request_id)
        except (NotReserved, UnknownRequest):
            return
        lease.enter()
        self.copies.append(Copy(lease))
        self.check()

    def end_copy(self, copy: Copy) -> None:
        self.copies.remove(copy)
        copy.lease.exit()
        self.check()

    def attach(self, seq: Sequence, *, has_first_token: bool = True) -> None:
        """With first tokens, unless outputs were delivered."""
        samples = self.scheduler.samples(seq.request_id)
        has_first_token &= not any(one.request.output_token_ids for one in samples)
        token_id = 9 if has_first_token else None
        others = {one.request.sample: 9 for one in samples[1:]} if has_first_token else {}
        for leader in samples[:1]:  # whichever sample it is called by, as the scheduler does
            is_waiting = leader.status is Status.AWAITING_KV and leader.awaits_transfer
            if is_waiting and not leader.num_promised_blocks:
                self._write(leader, leader.num_computed_tokens, leader.num_prompt_tokens)
        attached = self.scheduler.attach(seq.request_id, token_id, others)
        self._copy_blocks()
        for one in samples if attached is not None else ():
            if one.status is Status.ENDED:
                self._ends(sample_id(one), one.finish_reason)
        self.check()

    def compute_rest(self, seq: Sequence, num_tokens: int) -> None:
        """So many tokens of its prompt have come, to its leader."""
        for leader in self.scheduler.samples(seq.request_id)[:1]:
            is_claimed = not leader.num_promised_blocks
            if leader.status is Status.AWAITING_KV and leader.awaits_transfer and is_claimed:
                first = leader.num_computed_tokens
                self._write(leader, first, num_tokens - first)
        self.scheduler.compute_rest(seq.request_id, num_tokens)
        self.check()

    def _write(self, seq: Sequence, first: int, num_tokens: int) -> None:
        """KV of tokens from `first` on comes into its blocks."""
        size = self.scheduler.pool.block_size
        for position in range(first, min(first + num_tokens, seq.num_tokens)):
            slot = seq.block_table[position // size], position % size
            self.kv[slot] = int(seq.token_ids[position])

    def _check_kv(self, seq: Sequence) -> None:
        """All that it takes for computed is its own tokens' KV, shared or not."""
        size = self.scheduler.pool.block_size
        for position in range(seq.num_computed_tokens):
            slot = seq.block_table[position // size], position % size
            assert self.kv[slot] == seq.token_ids[position], (seq.request_id, position)

    def check(self) -> None:
        self.scheduler.check()
        for seq in self.scheduler.seqs:
            self._check_kv(seq)
        ledger = self.scheduler.pool.ledger()
        assert sum(astuple(ledger)) == self.scheduler.pool.num_blocks
        assert min(astuple(ledger)) >= 0
        assert ledger.unused == self.scheduler.pool.available
        self._check_owners()
        live = [s for s in self.seqs.values() if s.status is not Status.ENDED]
        assert self.scheduler.seqs == live
        for count, status in (
            (self.scheduler.num_waiting, Status.WAITING),
            (self.scheduler.num_running, Status.RUNNING),
            (self.scheduler.num_awaiting_kv, Status.AWAITING_KV),
        ):
            assert count == sum(s.status is status for s in live)

    def _check_owners(self) -> None:
        """Every block that is used has one owner that counts it."""
        assert not self.scheduler.holdings.discrepancy(self.scheduler.seqs)
        page = Books(self.scheduler).page()
        for state in ("held", "promised", "in_flight"):
            owned = [one for one in page.owned if one.state == state]
            assert sum(one.num_blocks for one in owned) == getattr(page.blocks, state)
            assert len({one.request_id for one in owned}) == len(owned)

    def check_empty(self) -> None:
        ledger = self.scheduler.pool.ledger()
        assert ledger.unused == self.scheduler.pool.num_blocks, ledger
        assert not self.scheduler.seqs
        if not self.swaps:
            assert self.scheduler.preemption.space.used_nbytes == 0
