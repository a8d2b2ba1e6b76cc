"""How many prompt tokens one step computes beside its decodes: so many, or for so long.

Pure. Either the budget is the step's tokens, or it is also the time that an objective for the gap
between two tokens of the running decodes leaves, by the fitted model of engine/step_cost.py. The
objective holds for each step, not for a stream's mean: a stream that was fast for a while has
slack, as Niyama (arXiv 2503.22562) would spend it, but whoever reads it sees the stall all the
same. Under the objective chunks end on tiles of the matrix product, and the first is a tile at
least: prefills always progress.
"""

from collections.abc import Iterable
from math import sqrt

from engine.sequence import Sequence
from engine.step_cost import StepCost, StepWork, sequence_work

TILE_TOKENS = 16
"""Rows of a matrix product that cost about as much as one more than the tile before; a multiple
of the usual block sizes, so that chunks fill blocks too."""


class StepPace:
    """Holds the objective `tpot_slo_s`; None: steps are as large as their tokens say."""

    def __init__(self, cost: StepCost, tpot_slo_s: float | None = None) -> None:
        self.cost = cost
        self._tpot_slo_s = tpot_slo_s

    def budget(self, max_tokens: int, decodes: Iterable[Sequence]) -> "StepBudget":
        """For prefills, of a step that may compute `max_tokens` beside `decodes`."""
        work = StepWork(steps=1)
        for seq in decodes:
            if not seq.is_prefill_leg:  # nobody waits for the next token of one
                work = work.plus(sequence_work(seq.num_computed_tokens, 1))
        if self._tpot_slo_s is None or not work.decodes:
            return StepBudget(max_tokens, self.cost)
        if not self.cost.knows_prefill:
            return StepBudget(max_tokens, self.cost, 0.0)
        return StepBudget(max_tokens, self.cost, self._tpot_slo_s - self.cost.predict(work))


class StepBudget:
    """What is left of one step. `seconds` None: time is no matter."""

    def __init__(self, tokens: int, cost: StepCost, seconds: float | None = None) -> None:
        self.tokens = tokens
        """May still be granted; 0 when the time is used up."""
        self._cost = cost
        self._seconds = seconds
        self._num_granted = 0

    def grant(self, first_position: int, num_tokens: int) -> int:
        """How many of a sequence's next tokens this step computes; perhaps none."""
        granted = most = min(num_tokens, self.tokens)
        if self._seconds is not None and most > 0:
            granted = min(most, self._num_in_time(first_position, most, self._seconds))
            self._seconds -= self._cost.predict(sequence_work(first_position, granted))
        # Nobody gets the crumbs that were too small for the one before.
        self.tokens = self.tokens - granted if granted == most else 0
        self._num_granted += granted
        return granted

    def _num_in_time(self, first_position: int, most: int, seconds: float) -> int:
        """Of the next `most` tokens; all of them, or up to the end of a tile."""
        _, _, _, per_token, per_pair = self._cost.weights
        # per_pair / 2 · n² + slope · n <= seconds
        slope = per_token + per_pair * (first_position + 0.5)
        if seconds <= 0:
            num_tokens = 0
        elif per_pair > 0:
            root = sqrt(slope * slope + 2 * per_pair * seconds)
            num_tokens = int(min(most, (root - slope) / per_pair))
        else:
            num_tokens = int(min(most, seconds / slope)) if slope > 0 else most
        if num_tokens >= most:
            return most
        whole = (self._num_granted + num_tokens) // TILE_TOKENS * TILE_TOKENS
        return max(whole - self._num_granted, 0) if self._num_granted else max(whole, TILE_TOKENS)
