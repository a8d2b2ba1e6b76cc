"""Pauses and endings; the rest of the supervisor is seen in test_up."""

from hypothesis import given
from hypothesis import strategies as st

from deploy.processes import LONGEST_PAUSE_S, STEADY_S, how_it_ended, next_pause


def test_pauses_double_up_to_a_limit_and_begin_anew_after_a_steady_run() -> None:
    pauses = [0.0]
    for _ in range(6):
        pauses.append(next_pause(pauses[-1], uptime_s=1))
    assert pauses[1:] == [0.5, 1, 2, 4, 5, 5]
    assert next_pause(5.0, uptime_s=STEADY_S) == 0.5


@given(last=st.floats(0, 5), uptime=st.floats(0, 1e6))
def test_there_is_always_a_pause_and_never_a_long_one(last: float, uptime: float) -> None:
    assert 0 < next_pause(last, uptime_s=uptime) <= LONGEST_PAUSE_S


def test_endings_are_words() -> None:
    assert how_it_ended(3) == "ended with status 3"
    assert how_it_ended(-11) == "was killed by SIGSEGV"
