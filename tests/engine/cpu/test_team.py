"""Threads that run one function together, and share regions of work."""

import threading
import time
from functools import partial

import numpy as np
import pytest

pytest.importorskip("numba")

from engine.cpu.jit import kernel
from engine.cpu.layout import Ints
from engine.cpu.sync import claim_alone, complete, new_counters
from engine.cpu.team import Team


@kernel
def _sum_twice(counters: Ints, thread: int, items: int, first: Ints, second: Ints) -> None:
    """second[i] is right only if all of `first` was there when its region began."""
    item = claim_alone(counters, 0, thread, items)
    while item >= 0:
        first[item] += item
        complete(counters, 0)
        item = claim_alone(counters, 0, thread, items)
    item = claim_alone(counters, 1, thread, items)
    while item >= 0:
        second[item] += first[items - 1 - item] + first[(item * 7) % items]
        complete(counters, 1)
        item = claim_alone(counters, 1, thread, items)


def _share(counters: Ints, first: Ints, second: Ints, thread: int) -> None:
    _sum_twice(counters, thread, len(first), first, second)


def test_each_item_is_done_once_and_regions_follow_each_other() -> None:
    team, items = Team(4), 1000
    for _ in range(50):
        counters = new_counters(2, 4)
        first, second = np.zeros(items, dtype=np.int64), np.zeros(items, dtype=np.int64)
        team.run(partial(_share, counters, first, second))
        order = np.arange(items)
        assert (first == order).all()
        assert (second == items - 1 - order + order * 7 % items).all()
    team.close()


def test_the_caller_waits_for_nobody_who_sleeps() -> None:
    """A member that comes late, or never, holds nothing up that it has not claimed."""
    team, gate, seen = Team(2), threading.Event(), list[int]()

    def work(thread: int) -> None:
        if thread == 1:
            gate.wait(10)
        seen.append(thread)

    began = time.monotonic()
    team.run(work)
    assert seen == [0]
    assert time.monotonic() - began < 5
    gate.set()
    team.close()
    assert seen == [0, 1]


def test_a_failing_member_is_logged_and_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    team, done = Team(2), threading.Event()

    def fail(thread: int) -> None:
        if thread == 1:
            raise ValueError("no")

    team.run(fail)
    team.run(lambda thread: done.set() if thread == 1 else None)
    assert done.wait(10)
    team.close()
    assert "a thread of the engine's team failed" in caplog.text


def test_a_closed_team_leaves_no_thread() -> None:
    team = Team(3)
    team.run(lambda thread: None)
    team.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("engine-")]
