"""Retries are bounded, for a prompt and for all of them, and do not come in step."""

from hypothesis import given
from hypothesis import strategies as st

from router.retry import IN_ALL, LONGEST_PAUSE_S, Attempts, RetryBudget


@given(st.lists(st.booleans(), max_size=100), st.integers(1, 8))
def test_a_prompt_ends_after_so_many_failures_in_a_row(got_on: list[bool], most: int) -> None:
    attempts = Attempts(most)
    in_row = 0
    for num, one in enumerate(got_on, 1):
        attempts.failed(got_on=one)
        in_row = 1 if one else in_row + 1
        assert attempts.are_over == (in_row >= most or num >= IN_ALL * most)
        if attempts.are_over:
            return


@given(st.integers(1, 40), st.floats(0, 1, exclude_max=True))
def test_pauses_are_jittered_and_bounded(num_failures: int, draw: float) -> None:
    attempts = Attempts(100)
    for _ in range(num_failures):
        attempts.failed(got_on=False)
    longest = attempts.pause_s(1.0)
    assert attempts.pause_s(draw) == draw * longest
    assert longest <= LONGEST_PAUSE_S
    assert (longest == 0) == (num_failures == 1), "the first retry goes at once"


def test_pauses_double() -> None:
    attempts = Attempts(100)
    longest = []
    for _ in range(8):
        attempts.failed(got_on=False)
        longest.append(attempts.pause_s(1.0))
    assert longest == [0.0, 0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0]
    attempts.failed(got_on=True)
    assert attempts.pause_s(1.0) == 0


@given(
    ratio=st.floats(0, 1),
    reserve=st.floats(0, 20),
    capacity=st.floats(0, 50),
    events=st.lists(st.tuples(st.sampled_from(["prompt", "retry"]), st.floats(0, 5))),
)
def test_retries_are_a_part_of_the_prompts(
    ratio: float, reserve: float, capacity: float, events: list[tuple[str, float]]
) -> None:
    budget = RetryBudget(ratio=ratio, reserve_per_s=reserve, capacity=capacity)
    now = num_prompts = num_taken = 0.0
    for what, passes in events:
        now += passes
        if what == "prompt":
            budget.note_prompt(now)
            num_prompts += 1
        else:
            num_taken += budget.take(now)
        assert num_taken <= capacity + ratio * num_prompts + reserve * now + 1e-6


def test_an_empty_budget_fills_again() -> None:
    budget = RetryBudget(ratio=0.5, reserve_per_s=1, capacity=2)
    assert [budget.take(0.0) for _ in range(3)] == [True, True, False]
    budget.note_prompt(0.0)
    assert not budget.take(0.0)
    budget.note_prompt(0.0)
    assert budget.take(0.0)
    assert not budget.take(0.5)
    assert budget.take(1.0)
    assert [budget.take(100.0) for _ in range(3)] == [True, True, False], "it does not save more"
