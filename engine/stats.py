"""What an engine counts (`StepCounters`), and the immutable snapshot that any thread may read."""

from collections.abc import Iterable
from operator import mul
from typing import NamedTuple

from engine.block_ledger import BlockLedger
from engine.books import Books
from engine.scheduled_batch import Computed
from engine.scheduler import Scheduler
from engine.sequence import Sequence
from engine.step_cost import StepWork, sequence_work
from engine.step_meter import StepMeter


class EngineStats(NamedTuple):
    """Published by the engine thread each turn. Counters only grow."""

    waiting: int
    """Requests not scheduled yet, or not any more: they hold nothing."""
    running: int
    """Requests in the batch."""
    awaiting_kv: int
    """Requests with a promise or blocks, whose KV has not come."""
    blocks: BlockLedger
    pins: int
    """Prefixes that are to stay in the cache."""
    prompt_tokens_computed: int
    prompt_tokens_received: int
    """Attached: their KV was computed by another worker."""
    prompt_tokens_hit: int
    """Found in the prefix cache: neither computed nor received, again after a preemption
    included."""
    output_tokens_computed: int
    """Each output token but the last is computed once; those of resumed and preempted sequences
    again."""
    tokens_sampled: int
    queue_seconds: float
    """How long a prompt that came now would wait, by prediction."""
    prefills_refused: int
    """Prefill legs that would have waited too long."""
    preemptions: int
    """Running sequences that gave way, to be computed again or swapped."""
    swap_used_nbytes: int
    """Host memory with KV of sequences that gave way."""
    swap_capacity_nbytes: int
    tokens_swapped_out: int
    """Copied to host memory; a token's KV perhaps several times."""
    tokens_swapped_in: int
    """Copied back, instead of being computed again."""
    steps: int
    """Steps that computed something."""
    turns: int
    """Turns of the engine loop, idle or not; at least one a second while it lives."""
    ledger_violations: int
    """Audits of the blocks' ledger that found the sums wrong."""
    step_seconds: float
    """What measured steps took, in all."""
    step_seconds_predicted: float
    """What the cost model said of the same steps before they ran."""
    step_seconds_error: float
    """Sum of the absolute differences between the two."""
    step_work: StepWork
    """Of the same steps, summed."""
    step_weights: tuple[float, ...]
    """Seconds that the model reckons now for one of each feature of `StepWork`."""
    knows_prefill: bool
    """It has seen some prefills."""

    @property
    def step_cost(self) -> dict[str, float]:
        """The same, by the features' names."""
        return dict(zip(StepWork._fields, self.step_weights, strict=True))

    def prefill_s(self, first_position: int, num_tokens: int) -> float | None:
        """What computing so many tokens of a prompt would take, in one step; None if unknown."""
        if not self.knows_prefill:
            return None
        work = sequence_work(first_position, num_tokens).plus(StepWork(steps=1))
        seconds: float = sum(map(mul, self.step_weights, work))
        return seconds


class StepCounters:
    """The counters behind `EngineStats`. Engine thread only."""

    def __init__(self, meter: StepMeter) -> None:
        self.turns = 0
        self._meter = meter
        self._steps = 0
        self._prompt_tokens = 0
        self._prompt_tokens_received = 0
        self._prompt_tokens_hit = 0
        self._output_tokens = 0
        self._tokens_sampled = 0

    def count(self, computed: Iterable[Computed]) -> None:
        """One step."""
        self._steps += 1
        for seq, first_position, num_tokens, token_id in computed:
            num_prompt = seq.num_prompt_tokens - first_position  # from there on; may be negative
            num_prompt = 0 if num_prompt < 0 else min(num_prompt, num_tokens)
            self._prompt_tokens += num_prompt
            self._output_tokens += num_tokens - num_prompt
            self._tokens_sampled += token_id is not None

    def count_received(self, seq: Sequence, end: int) -> None:
        """[its cached tokens, end) of its prompt came by a transfer."""
        self._prompt_tokens_hit += seq.num_cached_tokens
        self._prompt_tokens_received += max(0, end - seq.num_cached_tokens)

    def count_hits(self, seqs: Iterable[Sequence]) -> None:
        """They run behind a cached prefix."""
        for seq in seqs:
            self._prompt_tokens_hit += min(seq.num_cached_tokens, seq.num_prompt_tokens)

    def snapshot(self, scheduler: Scheduler, books: Books) -> EngineStats:
        return EngineStats(
            waiting=scheduler.num_waiting,
            running=scheduler.num_running,
            awaiting_kv=scheduler.num_awaiting_kv,
            blocks=scheduler.pool.ledger(),
            pins=scheduler.pool.num_pins,
            prompt_tokens_computed=self._prompt_tokens,
            prompt_tokens_received=self._prompt_tokens_received,
            prompt_tokens_hit=self._prompt_tokens_hit,
            output_tokens_computed=self._output_tokens,
            tokens_sampled=self._tokens_sampled,
            queue_seconds=scheduler.queue_s,
            prefills_refused=scheduler.queue_bound.num_refused,
            preemptions=scheduler.preemption.num_preemptions,
            swap_used_nbytes=scheduler.preemption.space.used_nbytes,
            swap_capacity_nbytes=scheduler.preemption.space.capacity_nbytes,
            tokens_swapped_out=scheduler.preemption.space.tokens_out,
            tokens_swapped_in=scheduler.preemption.space.tokens_in,
            steps=self._steps,
            turns=self.turns,
            ledger_violations=books.num_violations,
            step_seconds=self._meter.measured_s,
            step_seconds_predicted=self._meter.predicted_s,
            step_seconds_error=self._meter.error_s,
            step_work=self._meter.work,
            knows_prefill=self._meter.cost.knows_prefill,
            step_weights=tuple(self._meter.cost.weights),
        )
