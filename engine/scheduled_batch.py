"""What passes between the scheduler and the step: `ScheduledBatch` in, `Computed` out."""

from collections.abc import Container, Iterable
from dataclasses import dataclass, field
from itertools import compress
from typing import NamedTuple

from engine.kv_lease import KVLease
from engine.request import BlockId, PromptLogprobs, RequestId, TokenLogprobs
from engine.sequence import Sequence
from engine.step_cost import StepWork, step_work
from engine.swap_space import Swap


@dataclass(frozen=True, slots=True)
class SwapIn:
    """Tokens [first_token, swap.num_tokens) of a swap come back; the others were still cached."""

    swap: Swap
    lease: KVLease
    """On the blocks that they go into; entered."""
    first_token: int

    @property
    def num_tokens(self) -> int:
        return self.swap.num_tokens - self.first_token


class BlockCopy(NamedTuple):
    """Within the pool, all layers and heads."""

    source: BlockId
    target: BlockId


@dataclass(frozen=True, slots=True)
class ScheduledBatch:
    """One step."""

    seqs: list[Sequence]
    """Each with `num_scheduled_tokens` > 0, in batch order; perhaps none."""
    lost: list[Sequence]
    """Lost their reservation, before `reserved` was decided."""
    reserved: list[Sequence]
    """Have room for their prompt now."""
    hits: list[Sequence]
    """Begin to run behind a cached prefix, in this step."""
    swap_outs: list[Swap] = field(default_factory=list)
    """To be copied to host memory."""
    swap_ins: list[SwapIn] = field(default_factory=list)
    """To be copied back."""

    def work(self) -> StepWork:
        """Before `Scheduler.update`, which moves the counters on."""
        return step_work((s.num_computed_tokens, s.num_scheduled_tokens) for s in self.seqs)


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What the tensor side answers to a step."""

    token_ids: list[int]
    """One for each sequence that samples, in batch order; see `sampling`."""
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    """One for each token, None where none was asked for; or empty: nobody asked."""
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)
    """Of sequences that computed prompt tokens and want them told."""


def sampling(seqs: Iterable[Sequence]) -> list[Sequence]:
    """Those that take a token from this step's logits, in order: samples that fork now do so
    behind the one that has computed their prompt."""
    return [drawn for seq in seqs if seq.samples_next for drawn in seq.drawn]


def stuck_grammars(batch: ScheduledBatch) -> dict[Sequence, str]:
    """Those that were sampled from and whose grammar allowed no token, and why."""
    if not any(seq.grammar is not None or seq.forks for seq in batch.seqs):
        return {}  # nearly always: each step asks
    grammars = ((seq, seq.grammar) for seq in sampling(batch.seqs))
    return {seq: g.failure for seq, g in grammars if g is not None and g.failure is not None}


def take_out(batch: ScheduledBatch, output: StepOutput, gone: Container[RequestId]) -> StepOutput:
    """`output` without what belongs to the requests of `gone`, which leave the batch."""
    keeps = [seq.request_id not in gone for seq in sampling(batch.seqs)]
    batch.seqs[:] = [seq for seq in batch.seqs if seq.request_id not in gone]
    return StepOutput(
        list(compress(output.token_ids, keeps)),
        list(compress(output.logprobs, keeps)),
        [told for told in output.prompt_logprobs if told.request_id not in gone],
    )


class Computed(NamedTuple):
    """What a step did for a sequence."""

    seq: Sequence
    first_position: int
    num_tokens: int
    """Tokens computed, from `first_position` on; none for a sample that forks."""
    token_id: int | None
    """The token sampled, if any; already in `seq`."""
