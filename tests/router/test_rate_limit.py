"""Requests and tokens a minute, requests at once; and what OpenAI's headers say of them."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.rate_limit import RateLimits, duration
from router.tenant import EVERYBODY, Grant, Limits, Tenant


def grant(requests: int = 0, tokens: int = 0, concurrent: int = 0, name: bytes = b"k") -> Grant:
    return Grant(Tenant("t"), Limits(requests, tokens, concurrent), digest=name)


def test_a_minutes_worth_at_once_then_evenly() -> None:
    limits, key = RateLimits(), grant(requests=60)
    assert [limits.begin(key, 0.0) for _ in range(60)] == [None] * 60
    refusal = limits.begin(key, 0.0)
    assert refusal is not None
    assert (refusal.reason, refusal.limit) == ("requests_per_min", 60)
    assert refusal.retry_after_s == pytest.approx(1.0)
    assert limits.begin(key, 0.9) is not None
    assert limits.begin(key, 1.0) is None


def test_at_once() -> None:
    limits, key = RateLimits(), grant(concurrent=2)
    assert limits.begin(key, 0) is None
    assert limits.begin(key, 0) is None
    refusal = limits.begin(key, 0)
    assert refusal is not None
    assert refusal.reason == "concurrent"
    limits.end(key)
    assert limits.begin(key, 0) is None


def test_who_is_refused_for_one_limit_does_not_pay_for_another() -> None:
    limits, key = RateLimits(), grant(requests=2, concurrent=1)
    limits.begin(key, 0)
    for _ in range(10):
        assert limits.begin(key, 0) is not None
    limits.end(key)
    assert limits.begin(key, 0) is None


def test_tokens_are_given_back_or_owed() -> None:
    limits, key = RateLimits(), grant(tokens=600)
    assert limits.take_tokens(key, 500, 0) is None
    assert limits.take_tokens(key, 200, 0) is not None
    limits.settle(key, 500, used=100, now_s=0)
    assert limits.take_tokens(key, 500, 0) is None
    limits.settle(key, 500, used=700, now_s=0)
    refusal = limits.take_tokens(key, 1, 0)
    assert refusal is not None
    assert refusal.retry_after_s == pytest.approx(20.1)  # 200 owed, and one more, at 10 a second


def test_what_is_larger_than_the_bucket_passes_when_that_is_full() -> None:
    limits, key = RateLimits(), grant(tokens=100)
    assert limits.take_tokens(key, 300, 0) is None
    refusal = limits.take_tokens(key, 300, 0)
    assert refusal is not None
    assert refusal.retry_after_s == pytest.approx(180)
    assert limits.take_tokens(key, 300, 181) is None


def test_no_limit_is_none_and_says_nothing() -> None:
    limits = RateLimits()
    for _ in range(1000):
        assert limits.begin(EVERYBODY, 0) is None
        assert limits.take_tokens(EVERYBODY, 1e9, 0) is None
        limits.settle(EVERYBODY, 1e9, 1e9, 0)
    assert limits.headers(EVERYBODY, 0) == []


def test_headers_are_openais() -> None:
    limits, key = RateLimits(), grant(requests=60, tokens=6000)
    limits.begin(key, 0)
    limits.take_tokens(key, 150.5, 0)
    assert dict(limits.headers(key, 0)) == {
        b"x-ratelimit-limit-requests": b"60",
        b"x-ratelimit-remaining-requests": b"59",
        b"x-ratelimit-reset-requests": b"1s",
        b"x-ratelimit-limit-tokens": b"6000",
        b"x-ratelimit-remaining-tokens": b"5849",
        b"x-ratelimit-reset-tokens": b"1.505s",
    }


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-1, "0ms"),
        (0.0166, "17ms"),
        (1, "1s"),
        (8.64, "8.64s"),
        (360, "6m0s"),
        (3723.5, "1h2m3.5s"),
    ],
)
def test_durations_are_openais(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_new_limits_count_what_was_taken_before() -> None:
    limits = RateLimits()
    for _ in range(50):
        limits.begin(grant(requests=60), 0)
    assert dict(limits.headers(grant(requests=100), 0))[b"x-ratelimit-remaining-requests"] == b"50"
    assert dict(limits.headers(grant(requests=10), 0))[b"x-ratelimit-remaining-requests"] == b"0"


def test_keys_that_are_no_more_are_forgotten_when_nothing_of_them_runs() -> None:
    limits, kept, gone, busy = RateLimits(), grant(1), grant(1, name=b"g"), grant(1, name=b"b")
    for key in (kept, gone, busy):
        limits.begin(key, 0)
    limits.end(kept)
    limits.end(gone)
    limits.keep([kept])
    assert limits.begin(kept, 0) is not None
    assert limits.begin(gone, 0) is None
    limits.end(busy)  # as it was


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 5), st.integers(1, 50)), max_size=200))
def test_no_more_than_a_bucket_and_what_filled_it(steps: list[tuple[float, int]]) -> None:
    limits, key, now_s, taken = RateLimits(), grant(tokens=120), 0.0, 0
    for pause_s, cost in steps:
        now_s += pause_s
        refusal = limits.take_tokens(key, cost, now_s)
        if refusal is None:
            taken += cost
        else:  # and what it says is true
            assert limits.take_tokens(key, cost, now_s + refusal.retry_after_s + 1e-6) is None
            now_s += refusal.retry_after_s + 1e-6
            taken += cost
        assert taken <= 120 + 2 * now_s + 1e-3
