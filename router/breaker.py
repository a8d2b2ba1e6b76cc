"""Whether a worker's calls go well enough to send it more. Pure: clock and draw are arguments.

    closed ──calls fail too often──▶ open ──its time is over──▶ half-open ──a probe──▶ closed
                                      ▲                             │       is good
                                      └──it is not: twice the time──┘

* Calls are counted with weights that halve every `HALF_LIFE_S`. It opens when `MIN_FAILURES` have
  failed, and they are at least half of all: a worker that fails now and then is worth a retry, one
  that fails mostly is not.
* What is the client's own fault (400), a full queue, or a call that nobody wants any more says
  nothing of the worker, and is not counted: there is no method for it.
* Half-open it takes nothing but one probe, which is the router's own and no client's.

Source: M. Nygard, "Release It!", circuit breaker.
"""

from typing import Literal

HALF_LIFE_S = 5.0
MIN_FAILURES = 5.0
SHARE = 0.5

FIRST_OPEN_S = 1.0
LONGEST_OPEN_S = 15.0

State = Literal["closed", "open", "half_open"]


class CircuitBreaker:
    """Of one worker. Times are of one clock and never go back."""

    def __init__(self) -> None:
        self._failures = self._successes = 0.0
        self._counted_s = 0.0
        self._open_until_s: float | None = None
        self._open_s = 0.0  # how long it was opened for, before jitter
        self._is_probing = False

    def state(self, now_s: float) -> State:
        if self._open_until_s is None:
            return "closed"
        return "open" if now_s < self._open_until_s else "half_open"

    def succeeded(self, now_s: float) -> None:
        """A call went well. Of one that began before it opened, nothing follows."""
        if self._open_until_s is None:
            self._decay(now_s)
            self._successes += 1

    def failed(self, now_s: float, draw: float) -> None:
        """A call failed. `draw` is uniform in [0, 1)."""
        if self._open_until_s is not None:
            return
        self._decay(now_s)
        self._failures += 1
        total = self._failures + self._successes
        # A little less, or five failures in a moment would not be five.
        if self._failures > MIN_FAILURES - 0.5 and self._failures >= SHARE * total:
            self._open(now_s, FIRST_OPEN_S, draw)

    def begin_probe(self, now_s: float) -> bool:
        """True: a probe is due, and the caller makes it; then `end_probe`."""
        if self.state(now_s) != "half_open" or self._is_probing:
            return False
        self._is_probing = True
        return True

    def end_probe(self, now_s: float, draw: float, *, went_well: bool) -> None:
        assert self._is_probing
        self._is_probing = False
        if went_well:
            self._open_until_s, self._failures, self._successes = None, 0.0, 0.0
        else:
            self._open(now_s, min(LONGEST_OPEN_S, 2 * self._open_s), draw)

    def _open(self, now_s: float, open_s: float, draw: float) -> None:
        """For between half of that time and all of it: routers do not probe in step."""
        self._open_s = open_s
        self._open_until_s = now_s + open_s * (0.5 + 0.5 * draw)

    def _decay(self, now_s: float) -> None:
        kept = 0.5 ** (max(0.0, now_s - self._counted_s) / HALF_LIFE_S)
        self._failures *= kept
        self._successes *= kept
        self._counted_s = now_s
