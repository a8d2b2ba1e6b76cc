"""How long a step takes, judged by what it computes: a linear model, fitted step by step.

    seconds = w · (steps, decodes, decode_context, prefill_tokens, prefill_attention),  w >= 0

Pure: it is fed (work, seconds) and has no clock. Life of a sample (`learn`):

1. A step that took much longer or shorter than predicted (the process was stopped) counts as
   `_SURPRISE` times the prediction, no more. If the next of its kind is as surprising, the machine
   has changed: what was known of that kind is forgotten faster.
2. It joins the decayed normal equations of its kind, steps with a prefill or without: what is known
   of prefills does not fade in a long spell without any. Errors are relative to the prediction, so
   that a short decode step weighs as much as a long prefill.
3. Of the first samples of a kind, slow ones weigh little beside fast ones, as each is reckoned
   relative to itself. Before there are `_NUM_FIRST` nothing should be built on predictions.
4. A few sweeps of coordinate descent, each weight kept at 0 or above, start from the weights so far
   (recursive least squares with forgetting, and without its negative weights); of plain decode
   steps, which are many and differ little, only with every `_FIT_EVERY`-th. Where samples leave it
   open which term a cost belongs to, the terms that grow with the tokens have it first: a model in
   doubt says that more tokens cost more.

Predictions are never negative and never fall when work is added. The features are those of
DistServe's and Niyama's cost models (arXiv 2401.09670, 2503.22562).
"""

from collections.abc import Iterable
from operator import add, mul
from typing import NamedTuple

_FORGET = 0.97
_FORGET_CHANGED = 0.7
_SURPRISE = 3.0
_NUM_FIRST = 4  # samples of a kind that count as they are: there is nothing yet to be surprised by
_NUM_SWEEPS = 6
_FIT_EVERY = 4  # of plain decode steps
_SWEEP = (3, 4, 1, 2, 0)  # indices of StepWork, those first that cost goes to in doubt


class StepWork(NamedTuple):
    """What a step computes, or several together: every feature adds up."""

    steps: int = 0
    decodes: int = 0
    """Sequences with one token."""
    decode_context: int = 0
    """Tokens that those attend to."""
    prefill_tokens: int = 0
    """Tokens of sequences with more than one."""
    prefill_attention: int = 0
    """Pairs of such a token and one that it attends to."""

    def plus(self, other: "StepWork") -> "StepWork":
        return StepWork(*map(add, self, other))


def sequence_work(first_position: int, num_tokens: int) -> StepWork:
    """Of computing tokens [first_position, first_position + num_tokens) of one sequence."""
    return step_work([(first_position, num_tokens)], steps=0)


def step_work(parts: Iterable[tuple[int, int]], steps: int = 1) -> StepWork:
    """Of a step; `parts` as in `sequence_work`."""
    decodes = context = tokens = attention = 0
    for first_position, num_tokens in parts:
        if num_tokens == 1:
            decodes += 1
            context += first_position + 1
        else:
            tokens += num_tokens
            attention += num_tokens * first_position + num_tokens * (num_tokens + 1) // 2
    return StepWork(steps, decodes, context, tokens, attention)


class StepCost:
    """See the module."""

    def __init__(self) -> None:
        self.weights = [0.0] * len(StepWork._fields)
        """Seconds, in the order of StepWork."""
        self._kinds = {False: _NormalEquations(), True: _NormalEquations()}

    @property
    def knows_prefill(self) -> bool:
        """It has seen some: the first are often slow, for caches are cold and code is new."""
        return not self._kinds[True].is_new

    def predict(self, work: StepWork) -> float:
        """Seconds."""
        seconds: float = sum(map(mul, self.weights, work))
        return seconds

    def learn(self, work: StepWork, seconds: float) -> None:
        """`work` took `seconds`, which is positive."""
        assert seconds > 0, seconds
        has_prefill = work.prefill_tokens > 0
        kind = self._kinds[has_prefill]
        predicted = self.predict(work)
        if kind.is_new or predicted == 0:
            kind.add([amount / seconds for amount in work], 1.0, is_surprise=False)
        else:
            ratio = seconds / predicted
            credible = min(max(ratio, 1 / _SURPRISE), _SURPRISE)
            kind.add([amount / predicted for amount in work], credible, credible != ratio)
        if has_prefill or kind.is_new or kind.num_samples % _FIT_EVERY == 0:
            self._fit()

    def _fit(self) -> None:
        weights, kinds = self.weights, tuple(self._kinds.values())
        gram = [[*map(add, *rows)] for rows in zip(*(k.gram for k in kinds), strict=True)]
        moment = [*map(add, *(k.moment for k in kinds))]
        for _ in range(_NUM_SWEEPS):
            for i in _SWEEP:
                row = gram[i]
                if row[i] > 0:
                    rest = sum(map(mul, row, weights)) - row[i] * weights[i]
                    weights[i] = max(0.0, (moment[i] - rest) / row[i])


class _NormalEquations:
    """Σ x xᵀ and Σ x y over the samples of one kind, older ones weighing less."""

    def __init__(self) -> None:
        size = range(len(StepWork._fields))
        self.gram = [[0.0 for _ in size] for _ in size]
        self.moment = [0.0 for _ in size]
        self.num_samples = 0
        self._was_surprise = False

    @property
    def is_new(self) -> bool:
        return self.num_samples < _NUM_FIRST

    def add(self, x: list[float], y: float, is_surprise: bool) -> None:
        keep = _FORGET_CHANGED if is_surprise and self._was_surprise else _FORGET
        self.num_samples += 1
        self._was_surprise = is_surprise
        for row, x_i in zip(self.gram, x, strict=True):
            row[:] = [keep * g + x_i * x_j for g, x_j in zip(row, x, strict=True)]
        self.moment[:] = [keep * m + x_i * y for m, x_i in zip(self.moment, x, strict=True)]
