"""Measures steps for the cost model. Engine thread only.

Where a step that samples nothing returns before the device is done, its time is found in the next
one that waits: such steps are one measurement together, as all of `StepWork` adds up.
"""

import time
from collections.abc import Callable

from engine.step_cost import StepCost, StepWork


class StepMeter:
    """See the module. `clock` in seconds."""

    def __init__(
        self, cost: StepCost, is_async: bool, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.cost = cost
        self.work = StepWork()
        self.measured_s = 0.0
        """All steps measured so far, as the one above and the next two."""
        self.predicted_s = 0.0
        """Before each was measured."""
        self.error_s = 0.0
        """Sum of the absolute differences."""
        self._is_async = is_async
        self._clock = clock
        self._work = StepWork()  # of the measurement under way
        self._began: float | None = None

    def begin(self) -> None:
        """A step is about to be scheduled."""
        if self._began is None:
            self._began = self._clock()

    def end(self, work: StepWork, *, is_waited_for: bool) -> None:
        """It is over, and has told what it did. `is_waited_for`: a token was read."""
        self._work = self._work.plus(work)
        if is_waited_for or not self._is_async:
            self._learn()

    def drop(self) -> None:
        """Nothing was computed, or it failed: what was begun is no measurement."""
        self._work, self._began = StepWork(), None

    def _learn(self) -> None:
        assert self._began is not None, "end without begin"
        seconds = self._clock() - self._began
        predicted = self.cost.predict(self._work)
        self.work = self.work.plus(self._work)
        self.measured_s += seconds
        self.predicted_s += predicted
        self.error_s += abs(seconds - predicted)
        if seconds > 0:
            self.cost.learn(self._work, seconds)
        self.drop()
