"""How fast a connection carries frames, by the frames it has carried. Pure: it is told the times.

A frame is on its way from when it was posted, or when the one before it was received if that was
later, until it is received: so what is measured is the wire, with the receiver's slots, and not
how long a frame waited behind others or for the model to compute it. Messages that complete before
the peer receives them would look faster than any wire: only frames larger than those count. Nor do
those count that the receiver may have kept waiting on purpose (PACED).
"""

import math

_MIN_NBYTES = 256 << 10
_WEIGHT = 0.2
"""Of the newest frame, at equal sizes."""


class LinkSpeed:
    """See the module."""

    def __init__(self) -> None:
        self._seconds = self._nbytes = 0.0  # of the last frames, older ones weighing less
        self._last_received_s = 0.0
        self._paced_until_s = 0.0

    @property
    def nbytes_per_s(self) -> float | None:
        """None: no frame has told yet."""
        return self._nbytes / self._seconds if self._seconds > 0 else None

    def paced(self, is_on: bool, now_s: float) -> None:
        """The receiver may keep frames waiting on purpose from now on, or no longer does."""
        self._paced_until_s = math.inf if is_on else now_s

    def received(self, nbytes: int, posted_s: float, received_s: float) -> None:
        """A frame of so many bytes has arrived; by one clock, in the order of arrival."""
        began_s = max(posted_s, self._last_received_s)
        self._last_received_s = received_s
        if nbytes < _MIN_NBYTES or received_s <= began_s or began_s < self._paced_until_s:
            return
        keep = 1 - _WEIGHT
        self._seconds = keep * self._seconds + received_s - began_s
        self._nbytes = keep * self._nbytes + nbytes
