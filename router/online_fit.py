"""A linear model of times, fitted sample by sample: seconds = weights · features, weights >= 0.

Pure: it is fed (features, seconds) and has no clock. It starts from a prior, somebody else's
weights, which counts as `_PRIOR` samples, fades like them, and may be replaced at any time; of what
no sample tells it stands. As the engine's own fit (engine/step_cost.py) it is robust:

1. Errors are relative to the prediction: a short time weighs as much as a long one.
2. A sample that took much longer or shorter than predicted counts as `_SURPRISE` times the
   prediction, no more. If the next is as surprising, something has changed: the past is forgotten
   faster.
3. A few sweeps of coordinate descent, each weight kept at 0 or above. Predictions are never
   negative and never fall when a feature grows.
"""

from collections.abc import Sequence
from operator import mul

_FORGET = 0.97
_FORGET_CHANGED = 0.7
_SURPRISE = 3.0
_NUM_FIRST = 4
"""Samples that count as they are, where there is no prior to be surprised by."""
_NUM_SWEEPS = 8
_PRIOR = 2.0
_LEAST_PRIOR = 1e-9


class OnlineFit:
    """See the module."""

    def __init__(self, num_features: int, prior: Sequence[float] = ()) -> None:
        self.num_samples = 0
        self.weights = [0.0] * num_features
        self._prior = [0.0] * num_features
        self._pull = _PRIOR
        self._gram = [[0.0] * num_features for _ in range(num_features)]
        self._moment = [0.0] * num_features
        self._was_surprise = False
        if prior:
            self.set_prior(prior)

    @property
    def knows(self) -> bool:
        """It has a prior, or enough samples."""
        return any(self._prior) or self.num_samples >= _NUM_FIRST

    def set_prior(self, weights: Sequence[float]) -> None:
        """Begins where these are, as far as no samples say otherwise."""
        if list(weights) == self._prior:
            return
        self._prior[:] = weights
        if not self.num_samples:
            self.weights[:] = weights
        self._fit()

    def predict(self, features: Sequence[float]) -> float:
        """Seconds."""
        seconds: float = sum(map(mul, self.weights, features))
        return seconds

    def learn(self, features: Sequence[float], seconds: float) -> None:
        """These took so long; what took no time, or an infinite one, teaches nothing."""
        if not 0 < seconds < float("inf") or not any(features):
            return
        predicted = self.predict(features)
        is_new = self.num_samples < _NUM_FIRST and not any(self._prior)
        if is_new or predicted <= 0:
            self._add([x / seconds for x in features], 1.0, is_surprise=False)
        else:
            ratio = seconds / predicted
            credible = min(max(ratio, 1 / _SURPRISE), _SURPRISE)
            self._add([x / predicted for x in features], credible, is_surprise=credible != ratio)
        self._fit()

    def _add(self, x: list[float], y: float, *, is_surprise: bool) -> None:
        keep = _FORGET_CHANGED if is_surprise and self._was_surprise else _FORGET
        self._was_surprise = is_surprise
        self._pull = max(_LEAST_PRIOR, keep * self._pull)
        self.num_samples += 1
        for row, x_i in zip(self._gram, x, strict=True):
            row[:] = [keep * g + x_i * x_j for g, x_j in zip(row, x, strict=True)]
        self._moment[:] = [keep * m + x_i * y for m, x_i in zip(self._moment, x, strict=True)]

    def _fit(self) -> None:
        """Least squares, and the weights' relative distance from the prior."""
        for _ in range(_NUM_SWEEPS):
            for i, (row, prior) in enumerate(zip(self._gram, self._prior, strict=True)):
                pull = self._pull / prior**2 if prior > 0 else 0.0
                if row[i] + pull > 0:
                    rest = sum(map(mul, row, self.weights)) - row[i] * self.weights[i]
                    aim = self._moment[i] - rest + pull * prior
                    self.weights[i] = max(0.0, aim / (row[i] + pull))
