"""How long a prompt would wait for those before it, and whether that is too long.

Pure: predicted by the step-time model, so that a bound in milliseconds means the same on every
machine. A worker that has hardly measured a prefill yet predicts nothing and refuses nothing.
"""

from collections.abc import Iterable

from engine.errors import QueueFull
from engine.prefill_order import num_left
from engine.sequence import Sequence
from engine.step_cost import StepCost, StepWork, sequence_work


class QueueBound:
    """`max_wait_s` None: no wait is too long."""

    def __init__(self, cost: StepCost, token_budget: int, max_wait_s: float | None) -> None:
        self.num_refused = 0
        self._cost = cost
        self._token_budget = token_budget
        self._max_wait_s = max_wait_s

    def wait_s(self, ahead: Iterable[Sequence]) -> float:
        """Until those are computed, in steps of the whole budget; 0 while nothing is known."""
        if not self._cost.knows_prefill:
            return 0.0
        work = StepWork()
        for seq in ahead:
            if (left := num_left(seq)) > 0:
                work = work.plus(sequence_work(seq.num_tokens - left, left))
        num_steps = -(-(work.prefill_tokens + work.decodes) // self._token_budget)
        return self._cost.predict(work._replace(steps=num_steps))

    def check(self, ahead: Iterable[Sequence]) -> None:
        """Raises QueueFull if one that comes behind those would wait too long."""
        if self._max_wait_s is None:
            return
        wait_s = self.wait_s(ahead)
        if wait_s > self._max_wait_s:
            self.num_refused += 1
            raise QueueFull(wait_s, self._max_wait_s)
