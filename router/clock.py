"""How a worker's monotonic clock relates to the router's own, by what its `Status` says. Pure.

As NTP does it (RFC 5905): a question leaves, the answer says the other clock, and comes back; the
other clock was read somewhere in between, so its offset is known to half the round trip. Of the
samples the one that knows best counts. It knows less the older it gets, for clocks of two hosts
drift apart.
"""

from typing import NamedTuple

DRIFT = 50e-6
"""How far two clocks may part in a second, in seconds: quartz as it is sold."""


class ClockReading(NamedTuple):
    """`worker clock - offset_ns` is the router's, within `error_ns`."""

    offset_ns: int
    error_ns: int

    def ours(self, theirs_ns: int) -> int:
        return theirs_ns - self.offset_ns


class WorkerClock:
    """Of one worker process. Both clocks are monotonic, in nanoseconds."""

    def __init__(self) -> None:
        self._offset_ns = 0
        self._half_rtt_ns = 0
        self._at_ns: int | None = None
        self._generation = 0

    def note(self, asked_ns: int, answered_ns: int, theirs_ns: int) -> None:
        """A worker's answer of `theirs_ns` to what was asked and answered at these times of ours.
        ."""
        half_rtt_ns = (answered_ns - asked_ns + 1) // 2
        known = self.at(answered_ns)
        if theirs_ns and (known is None or half_rtt_ns <= known.error_ns):
            self._offset_ns = theirs_ns - (asked_ns + answered_ns) // 2
            # Drift counts from the earliest moment at which the other clock may have been read.
            self._half_rtt_ns, self._at_ns = half_rtt_ns, asked_ns

    def of_process(self, generation: int) -> None:
        """Who answers there; what is known of another process's clock is void."""
        if generation != self._generation:
            self._generation = generation
            self.forget()

    def forget(self) -> None:
        """Another process answers there."""
        self._at_ns = None

    def at(self, now_ns: int) -> ClockReading | None:
        """What is known now, if anything is."""
        if self._at_ns is None:
            return None
        aged_ns = int((now_ns - self._at_ns) * DRIFT)
        return ClockReading(self._offset_ns, self._half_rtt_ns + aged_ns)
