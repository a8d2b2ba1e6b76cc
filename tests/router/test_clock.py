"""What is known of another clock is true, and as sure as it says."""

from hypothesis import given
from hypothesis import strategies as st

from router.clock import DRIFT, WorkerClock

MS = 1_000_000
EXCHANGES = st.lists(
    st.tuples(st.integers(1, 2000 * MS), st.integers(1, 50 * MS), st.floats(0, 1)), min_size=1
)


@given(st.integers(-(10**15), 10**15), st.floats(-DRIFT, DRIFT), EXCHANGES)
def test_the_truth_is_within_the_error(
    offset: int, drift: float, exchanges: list[tuple[int, int, float]]
) -> None:
    clock = WorkerClock()
    now = 10**15

    def theirs(ours: int) -> int:
        return ours + offset + int((ours - 10**15) * drift)

    for pause, rtt, where in exchanges:
        asked = now + pause
        answered = asked + rtt
        clock.note(asked, answered, max(1, theirs(asked + int(rtt * where)) + 10**16))
        now = answered
        reading = clock.at(now)
        assert reading is not None
        assert abs(reading.offset_ns - 10**16 - (theirs(now) - now)) <= reading.error_ns + 2


def test_the_quickest_answer_counts_until_it_is_too_old() -> None:
    clock = WorkerClock()
    assert clock.at(0) is None
    clock.note(0, 2 * MS, 1000 * MS)
    clock.note(10 * MS, 30 * MS, 5000 * MS)  # ten times slower: it knows less
    reading = clock.at(30 * MS)
    assert reading is not None
    assert reading.offset_ns == 999 * MS
    assert MS <= reading.error_ns < 1.1 * MS
    assert reading.ours(1000 * MS) == 1 * MS
    long_after = 10**12
    clock.note(long_after, long_after + 20 * MS, long_after)
    reading = clock.at(long_after + 20 * MS)
    assert reading is not None
    assert 10 * MS <= reading.error_ns < 10.1 * MS
    clock.forget()
    assert clock.at(long_after) is None
    clock.note(0, 1, 0)  # a worker that does not tell
    assert clock.at(1) is None
