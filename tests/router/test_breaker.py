"""The circuit breaker: what opens it, what does not, and how it closes."""

from hypothesis import given
from hypothesis import strategies as st

from router.breaker import FIRST_OPEN_S, LONGEST_OPEN_S, MIN_FAILURES, CircuitBreaker

DRAWS = st.floats(0, 1, exclude_max=True)
MOST_S = LONGEST_OPEN_S


def opened(now_s: float = 0.0, draw: float = 0.0) -> CircuitBreaker:
    breaker = CircuitBreaker()
    for _ in range(5):
        breaker.failed(now_s, draw)
    return breaker


def test_five_failures_at_once_open_it() -> None:
    breaker = CircuitBreaker()
    for _ in range(4):
        breaker.failed(7.0, 0.0)
        assert breaker.state(7.0) == "closed"
    breaker.failed(7.0, 0.0)
    assert breaker.state(7.0) == "open"


@given(st.lists(st.booleans(), max_size=200))
def test_it_stays_closed_while_most_calls_go_well(calls: list[bool]) -> None:
    breaker, ahead = CircuitBreaker(), 0
    for goes_well in calls:
        if goes_well:
            breaker.succeeded(0.0)
            ahead += 1
        elif ahead > 1:
            breaker.failed(0.0, 0.5)
            ahead -= 1
        assert breaker.state(0.0) == "closed"


@given(st.floats(4.0, 100.0))
def test_failures_now_and_then_do_not_open_it(pause_s: float) -> None:
    """Less than five in two half-lives, whatever else."""
    breaker = CircuitBreaker()
    for index in range(100):
        breaker.failed(index * pause_s, 0.5)
        assert breaker.state(index * pause_s) == "closed"


@given(st.lists(st.tuples(st.floats(0, 30), st.booleans(), DRAWS), max_size=60))
def test_it_is_never_shut_for_long_and_probes_one_at_a_time(
    events: list[tuple[float, bool, float]],
) -> None:
    """Whatever comes, in a bounded time a probe is due; one that goes well closes it for good."""
    breaker, now = opened(draw=0.99), 0.0
    for passes, goes_well, draw in events:
        now += passes
        assert breaker.state(now + MOST_S) != "open"
        state = breaker.state(now)
        is_due = breaker.begin_probe(now)
        assert is_due == (state == "half_open")
        if is_due:
            assert not breaker.begin_probe(now), "one is under way"
            breaker.succeeded(now)
            breaker.failed(now, draw)
            assert breaker.state(now) == "half_open", "old calls say nothing now"
            breaker.end_probe(now, draw, went_well=goes_well)
            assert breaker.state(now) == ("closed" if goes_well else "open")
        elif state == "closed":
            for _ in range(int(MIN_FAILURES) - 1):
                breaker.failed(now, draw)
            if breaker.state(now) == "closed":
                breaker.failed(now, draw)
            assert breaker.state(now) == "open"


@given(DRAWS)
def test_it_stays_open_longer_each_time(draw: float) -> None:
    breaker, now, spans = opened(draw=draw), 0.0, []
    for _ in range(8):
        begin = now
        while breaker.state(now) == "open":
            now += 0.01
        spans.append(now - begin)
        assert breaker.begin_probe(now)
        breaker.end_probe(now, draw, went_well=False)
    jitter = 0.5 + 0.5 * draw
    for index, span in enumerate(spans):
        open_s = min(LONGEST_OPEN_S, FIRST_OPEN_S * 2**index)
        assert abs(span - open_s * jitter) < 0.02
