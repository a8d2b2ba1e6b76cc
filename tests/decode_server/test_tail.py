"""Whether decode computes a missing tail moves with what it has measured."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decode_server.tail import TailPolicy


def policy(seconds_a_token: float, max_tokens: int = 256) -> TailPolicy:
    made = TailPolicy(max_tokens)
    made.learn(1000, 1000 * seconds_a_token)
    return made


def test_the_choice_moves_with_the_measured_handoffs() -> None:
    slow, fast = policy(0.004), policy(0.0005)
    assert slow.is_cheaper_here(100, local_s=0.2)
    assert not fast.is_cheaper_here(100, local_s=0.2)
    for _ in range(30):
        fast.learn(200, 200 * 0.004)  # the prefill workers are busy now
    assert fast.is_cheaper_here(100, local_s=0.2)


@pytest.mark.parametrize(
    ("num_missing", "local_s", "max_tokens"),
    [(100, None, 256), (300, 0.001, 256), (1, 0.0001, 0)],
)
def test_not_when_nothing_is_known_the_tail_is_long_or_it_is_forbidden(
    num_missing: int, local_s: float | None, max_tokens: int
) -> None:
    assert not policy(0.004, max_tokens).is_cheaper_here(num_missing, local_s)
    assert not TailPolicy(256).is_cheaper_here(1, 0.0)


@given(st.integers(1, 256), st.floats(1e-6, 1e3), st.floats(1e-6, 1e3))
def test_a_slower_engine_never_computes_what_a_faster_one_would_not(
    num_missing: int, one: float, other: float
) -> None:
    made = policy(0.004)
    slow, fast = max(one, other), min(one, other)
    assert made.is_cheaper_here(num_missing, slow) <= made.is_cheaper_here(num_missing, fast)
