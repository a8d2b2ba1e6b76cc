"""What a prompt finds before it, by the worker's own order."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.prefill_queue import PrefillQueue, Wait


def test_first_come_first_served_waits_for_all() -> None:
    queue = PrefillQueue()
    queue.add(0.0, 1000, 1.0)
    queue.add(0.0, 100, 0.1)
    assert queue.look(0.0, 1) == pytest.approx((1.1, 0))
    assert queue.look(0.4, 1) == pytest.approx((0.7, 0))
    assert queue.look(1.05, 1) == pytest.approx((0.05, 0))
    assert queue.look(9.0, 1) == Wait(0.0, 0)


def test_the_short_goes_before_the_long_until_that_has_aged() -> None:
    queue = PrefillQueue(ageing=0.5)
    queue.add(0.0, 1000, 1.0)
    assert queue.look(0.0, 100) == Wait(0.0, 1)
    assert queue.look(0.0, 2000) == pytest.approx((1.0, 0))
    assert queue.look(0.95, 100) == pytest.approx((0.05, 0))  # little of it is left
    for _ in range(20):
        queue.add(0.95, 100, 0.1)
    ahead_s, num_behind = queue.look(0.95, 100)
    assert num_behind == 0
    assert ahead_s == pytest.approx(2.05)
    queue = PrefillQueue(ageing=0.5)
    queue.add(0.0, 1000, 1.0)
    for _ in range(19):
        queue.add(0.0, 100, 0.1)
    # More has come than it may be passed by.
    assert queue.look(0.0, 100) == pytest.approx((2.9, 0))


def test_who_has_a_first_token_is_no_more_in_the_way() -> None:
    queue, over = PrefillQueue(), [False]
    queue.add(0.0, 1000, 5.0, lambda: over[0])
    assert queue.look(1.0, 1).ahead_s == pytest.approx(4.0)
    over[0] = True
    assert queue.look(1.0, 1) == Wait(0.0, 0)


def test_what_others_have_sent_counts_as_before_it() -> None:
    queue = PrefillQueue(ageing=0.5)
    queue.add(0.0, 1000, 1.0)
    assert queue.look(0.0, 10, told_s=3.0) == pytest.approx((2.0, 1))
    assert queue.look(0.0, 10, told_s=0.5) == Wait(0.0, 1)  # it has not heard of ours yet


jobs = st.lists(
    st.tuples(st.floats(0, 2), st.integers(1, 5000), st.floats(0, 3)), min_size=1, max_size=12
)


@given(jobs, st.sampled_from([0.0, 0.5]), st.integers(1, 5000), st.integers(0, 5000))
def test_more_work_is_never_less_to_wait_for(
    given_jobs: list[tuple[float, int, float]], ageing: float, num: int, more: int
) -> None:
    queue, now_s, total_s = PrefillQueue(ageing), 0.0, 0.0
    for pause_s, num_tokens, seconds in given_jobs:
        now_s += pause_s
        total_s += seconds
        queue.add(now_s, num_tokens, seconds)
    short, long = queue.look(now_s, num), queue.look(now_s, num + more)
    assert 0 <= short.ahead_s <= long.ahead_s + 1e-9
    assert short.num_behind >= long.num_behind
    assert long.ahead_s <= total_s + 1e-9
    later = queue.look(now_s + 1.0, num)
    assert later.ahead_s <= total_s
    assert queue.look(now_s + total_s + 1.0, num) == Wait(0.0, 0)
