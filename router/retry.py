"""How often, and how soon, a prompt is tried again. Pure: the clock and the draw are arguments.

Two bounds, for two dangers:

* `Attempts`, one for each prompt: a prompt that fails wherever it goes ends after `max_in_row`
  attempts that brought no new token. One that got on in between was not at fault: a long answer
  may outlive any number of workers, up to `IN_ALL` times as many attempts.
* `RetryBudget`, one for the router: retries are a part of the prompts that come, so that a cluster
  in trouble is not asked ever more. A prompt whose client has tokens draws on it too, but is never
  refused by it: it is the others, of whom nobody has heard anything, that are told to come back.

The first retry goes at once, to somebody else. Later ones wait a random part of a time that
doubles (full jitter), so that prompts which failed together do not come again together.

Source: the token bucket of retries is that of Finagle's `RetryBudget`.
"""

from dataclasses import dataclass, field

IN_ALL = 8

FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 2.0


@dataclass(slots=True)
class Attempts:
    """Of one prompt."""

    max_in_row: int
    num_in_row: int = field(default=0, init=False)
    """Failed, since the last new token."""
    num_in_all: int = field(default=0, init=False)

    def failed(self, *, got_on: bool) -> None:
        """One more has; `got_on` says whether it brought new tokens."""
        self.num_in_row = 1 if got_on else self.num_in_row + 1
        self.num_in_all += 1

    @property
    def are_over(self) -> bool:
        return self.num_in_row >= self.max_in_row or self.num_in_all >= IN_ALL * self.max_in_row

    def pause_s(self, draw: float) -> float:
        """Before the next one. `draw` is uniform in [0, 1)."""
        if self.num_in_row < 2:
            return 0.0
        doublings = min(self.num_in_row - 2, 16)
        return draw * min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0**doublings)


class RetryBudget:
    """Of all prompts: `ratio` of a retry for each that comes, and `reserve_per_s` beside; never
    more than `capacity` together, which it starts with."""

    def __init__(self, *, ratio: float, reserve_per_s: float, capacity: float) -> None:
        assert min(ratio, reserve_per_s, capacity) >= 0
        self._ratio = ratio
        self._reserve_per_s = reserve_per_s
        self._capacity = self._balance = capacity
        self._last_s: float | None = None

    def note_prompt(self, now_s: float) -> None:
        self._flow(now_s)
        self._add(self._ratio)

    def take(self, now_s: float) -> bool:
        """Draws one retry, if there is one left."""
        self._flow(now_s)
        if self._balance < 1:
            return False
        self._balance -= 1
        return True

    def _flow(self, now_s: float) -> None:
        if self._last_s is not None:
            self._add(self._reserve_per_s * max(0.0, now_s - self._last_s))
        self._last_s = now_s

    def _add(self, amount: float) -> None:
        self._balance = min(self._capacity, self._balance + amount)
