"""Times of the last minutes as percentiles, for those who watch. Pure: the clock is given.

Times are counted in bins that grow by 2 %, a set of bins for each five seconds of the window. So
memory and work are bounded whatever the load, a note costs the same at any rate, and a percentile
is off by 1 % at most.
"""

import math
from collections import Counter, deque
from collections.abc import Sequence

from router.cluster_view import Latency, Percentiles

WINDOW_S = 300
BUCKET_S = 5
NUM_BUCKETS = WINDOW_S // BUCKET_S
_LOG_GROWTH = math.log(1.02)
_LOWEST_S, _HIGHEST_S = 1e-6, 1e4
"""What is beyond them counts as them: there are never more than some 1,200 bins."""


class RecentTimes:
    """Of one kind, in seconds."""

    def __init__(self) -> None:
        self._buckets: deque[_Bucket] = deque()
        self._all: Counter[int] = Counter()

    def note(self, now_s: float, seconds: float) -> None:
        number = math.floor(now_s / BUCKET_S)
        if not self._buckets or self._buckets[-1].number != number:
            self._forget(number)
            self._buckets.append(_Bucket(number))
        found = _bin_of(seconds)
        self._buckets[-1].add(found)
        self._all[found] += 1

    def told(self, now_s: float) -> Percentiles:
        number = math.floor(now_s / BUCKET_S)
        self._forget(number)
        p50: list[float | None] = [None] * NUM_BUCKETS
        p95 = list(p50)
        for bucket in self._buckets:
            place = NUM_BUCKETS - 1 - (number - bucket.number)
            p50[place], p95[place] = bucket.percentiles()
        half, nine_tenths, most = _percentiles(self._all, (0.5, 0.9, 0.99))
        return Percentiles(
            count=self._all.total(),
            p50_ms=half,
            p90_ms=nine_tenths,
            p99_ms=most,
            p50_series_ms=p50,
            p95_series_ms=p95,
        )

    def _forget(self, number: int) -> None:
        while self._buckets and self._buckets[0].number <= number - NUM_BUCKETS:
            self._all.subtract(self._buckets.popleft().counts)
            self._all = +self._all


class _Bucket:
    """Five seconds."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.counts: Counter[int] = Counter()
        self._percentiles: tuple[float | None, float | None] | None = None

    def add(self, found: int) -> None:
        self.counts[found] += 1
        self._percentiles = None

    def percentiles(self) -> tuple[float | None, float | None]:
        """The 50th and the 95th; worked out anew only if something has come."""
        if self._percentiles is None:
            p50, p95 = _percentiles(self.counts, (0.5, 0.95))
            self._percentiles = (p50, p95)
        return self._percentiles


class RecentLatency:
    """What the page shows of it."""

    def __init__(self) -> None:
        self.ttft = RecentTimes()
        self.tpot = RecentTimes()

    def told(self, now_s: float) -> Latency:
        return Latency(
            window_s=WINDOW_S,
            bucket_s=BUCKET_S,
            ttft=self.ttft.told(now_s),
            tpot=self.tpot.told(now_s),
        )


def _bin_of(seconds: float) -> int:
    inside = min(max(seconds, _LOWEST_S), _HIGHEST_S)
    return round(math.log(inside) / _LOG_GROWTH)


def _percentiles(counts: Counter[int], shares: Sequence[float]) -> list[float | None]:
    """In milliseconds, for each share in rising order: the least time that so many do not exceed;
    None if nothing was counted."""
    total, ordered = counts.total(), sorted(counts.items())
    if not total:
        return [None] * len(shares)
    found: list[float | None] = []
    seen, index = 0, -1
    for share in shares:
        while seen < math.ceil(share * total):
            index += 1
            seen += ordered[index][1]
        found.append(round(math.exp(ordered[index][0] * _LOG_GROWTH) * 1000, 3))
    return found
