"""What passes between the scheduler and the step: `ScheduledBatch` in, `Computed` out."""

from dataclasses import dataclass
from typing import NamedTuple

from engine.sequence import Sequence
from engine.step_cost import StepWork, sequence_work


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

    def work(self) -> StepWork:
        """Before `Scheduler.update`, which moves the counters on."""
        parts = [StepWork(steps=1)]
        parts += [sequence_work(s.num_computed_tokens, s.num_scheduled_tokens) for s in self.seqs]
        return StepWork(*map(sum, zip(*parts, strict=True)))


class Computed(NamedTuple):
    """What a step did for a sequence."""

    seq: Sequence
    first_position: int
    num_tokens: int
    """Tokens computed, from `first_position` on."""
    token_id: int | None
    """The token sampled, if any; already in `seq`."""
