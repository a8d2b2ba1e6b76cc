"""Percentiles of the last minutes: right within a percent, of the window only, in bounded room."""

import random

import pytest

from router.latency import BUCKET_S, NUM_BUCKETS, WINDOW_S, RecentTimes


def exact(times: list[float], share: float) -> float:
    """The least that so many do not exceed."""
    return sorted(times)[max(0, -(-int(share * 100) * len(times) // 100) - 1)]


def test_percentiles_are_right_within_a_percent() -> None:
    draw = random.Random(1)
    times = [draw.lognormvariate(-2, 1.5) for _ in range(5000)]
    recent = RecentTimes()
    for number, seconds in enumerate(times):
        recent.note(1000 + number * 0.01, seconds)
    told = recent.told(1050.0)
    assert told.count == 5000
    for share, ms in ((0.5, told.p50_ms), (0.9, told.p90_ms), (0.99, told.p99_ms)):
        assert ms == pytest.approx(exact(times, share) * 1e3, rel=0.0101)


def test_a_series_has_a_place_for_each_five_seconds() -> None:
    recent = RecentTimes()
    recent.note(1000.0, 0.1)
    recent.note(1004.9, 0.3)
    recent.note(1011.0, 0.2)
    told = recent.told(1012.0)
    assert len(told.p50_series_ms) == len(told.p95_series_ms) == NUM_BUCKETS
    assert told.p50_series_ms[-3:] == [
        pytest.approx(100, rel=0.01),
        None,
        pytest.approx(200, rel=0.01),
    ]
    assert told.p95_series_ms[-3] == pytest.approx(300, rel=0.01)
    assert set(told.p50_series_ms[:-3]) == {None}
    later = recent.told(1012.0 + BUCKET_S)
    assert later.p50_series_ms[-4:-1] == told.p50_series_ms[-3:]


def test_what_is_old_is_forgotten() -> None:
    recent = RecentTimes()
    recent.note(1000.0, 5.0)
    recent.note(1000.0 + WINDOW_S - BUCKET_S, 1.0)
    assert recent.told(1000.0 + WINDOW_S - BUCKET_S).count == 2
    told = recent.told(1000.0 + WINDOW_S)
    assert told.count == 1
    assert told.p99_ms == pytest.approx(1000, rel=0.01)
    told = recent.told(1e6)
    assert (told.count, told.p50_ms) == (0, None)
    recent.note(2e6, 1.0)
    assert recent.told(2e6).count == 1


def test_room_is_bounded_whatever_comes() -> None:
    recent = RecentTimes()
    draw = random.Random(2)
    for number in range(20_000):
        recent.note(number * 0.05, draw.choice([0.0, -1.0, 1e300, draw.uniform(0, 100)]))
    held = sum(len(bucket.counts) for bucket in recent._buckets) + len(recent._all)
    assert len(recent._buckets) <= NUM_BUCKETS
    assert held <= (NUM_BUCKETS + 1) * 1200
    assert recent.told(999.9).count == WINDOW_S * 20
