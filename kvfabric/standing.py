"""Receives that stand ready on a busy connection, so that its next transfer's frames wait for none.

OFFER takes a while: threads and loops on both sides pass it on before a receive is posted. Where
transfers follow each other closely the sender therefore offers some frames in advance, and takes
the offer back (VOID) if nothing has come of it, or as soon as the receiver wants its slots for
somebody else (RECALL). A connection that carries one now and then has none. Pure: it is told the
time, in seconds.
"""

LINGER_S = 0.1
"""What counts as closely; and how long an offer stands."""

NUM_FRAMES = 3
"""A short transfer; of a longer one, what is on its way while OFFER is."""


class Standing:
    """See the module. Of one connection, at its sender."""

    def __init__(self) -> None:
        self._ended_s: float | None = None
        self._is_busy = False
        self._until_s = 0.0
        self._is_paced = False

    def began(self, now_s: float) -> None:
        """A transfer did."""
        self._is_busy = self._ended_s is not None and now_s - self._ended_s < LINGER_S

    def ended(self, now_s: float) -> None:
        """One did, well."""
        self._ended_s = now_s
        self._until_s = now_s + LINGER_S if self._is_busy and not self._is_paced else 0.0

    def recalled(self) -> None:
        """The receiver is short of slots."""
        self._is_busy, self._until_s = False, 0.0

    def paced(self, is_on: bool) -> None:
        """A receiver that paces takes in one frame at a time: none may stand in the way."""
        self._is_paced = is_on
        if is_on:
            self.recalled()

    def num_frames(self, now_s: float) -> int:
        """To be on offer now beside those that will come."""
        return NUM_FRAMES if now_s < self._until_s else 0
