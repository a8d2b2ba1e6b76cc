"""Stop strings: the text ends before the first one, wherever tokens happen to be cut.

Of several stop strings the one that is complete first counts; of those, the longest. Text that
may be the beginning of a stop string is held back, so that none leaks in part.
"""


class StopStrings:
    """Watches one stream of text."""

    def __init__(self, stops: tuple[str, ...], *, are_kept: bool = False) -> None:
        """`are_kept`: the text ends behind the stop string."""
        assert all(stops), "an empty stop string would end every text"
        self._stops = stops
        self._are_kept = are_kept
        self._held = ""
        self.is_hit = False

    def push(self, text: str) -> str:
        """The text that is certainly before any stop string. Nothing is pushed after a hit."""
        assert not self.is_hit
        if not self._stops:
            return text
        self._held += text
        hits = [
            (begin + len(stop), begin)
            for stop in self._stops
            if (begin := self._held.find(stop)) >= 0
        ]
        if hits:
            self.is_hit = True
            end, begin = min(hits)
            return self._take(end if self._are_kept else begin)
        return self._take(len(self._held) - self._num_ambiguous())

    def flush(self) -> str:
        """What was held back, at the end of the stream."""
        return "" if self.is_hit else self._take(len(self._held))

    def _num_ambiguous(self) -> int:
        """Length of the longest end of the held text with which some stop string begins."""
        longest = max((len(stop) - 1 for stop in self._stops), default=0)
        for length in range(min(longest, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-length:]) for stop in self._stops):
                return length
        return 0

    def _take(self, length: int) -> str:
        text, self._held = self._held[:length], self._held[length:]
        return text
