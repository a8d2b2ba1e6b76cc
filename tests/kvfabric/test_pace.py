"""Frames for a share of the time: by a clock of the test's own, and between nodes."""

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvfabric.config import FabricConfig
from kvfabric.node import Node
from kvfabric.pace import Pace
from tests.kvfabric.rig import Sink, Source, expected, open_nodes, random_kv, ship_all, shipped


class Machine:
    """A clock, what copies have taken, and a pace by them."""

    def __init__(self, share: float | None) -> None:
        self.now_s = self.copied_s = 0.0
        self.share = share
        self.join_s = 0.0
        self.pace = Pace(
            lambda: self.share,
            lambda: self.copied_s,
            lambda: self.join_s,
            lambda: self.now_s,
            lambda: 0.0,
        )

    def frame(self, seconds: float) -> None:
        """Waits for its turn, and takes so long."""
        self.now_s += max(0.0, self.pace.pause_s())
        charged_s = self.pace.begin()
        self.now_s += seconds
        self.copied_s += seconds
        self.pace.done(charged_s)


@given(
    st.floats(0.05, 0.9),
    st.lists(st.floats(1e-4, 5e-3), min_size=5, max_size=60),
)
def test_frames_get_their_share_of_the_time_and_no_more(share: float, costs: list[float]) -> None:
    machine = Machine(share)
    for seconds in costs:
        machine.frame(seconds)
    machine.now_s += max(0.0, machine.pace.pause_s())
    assert machine.now_s == pytest.approx(sum(costs) / share, rel=1e-6)


def test_a_pause_is_as_long_as_the_frame_before_it_asks_for() -> None:
    machine = Machine(0.25)
    machine.frame(0.004)
    assert machine.pace.pause_s() == pytest.approx(0.012)
    machine.now_s += 1.0  # what is not used is not saved up
    assert machine.pace.pause_s() < 0
    machine.frame(0.004)
    assert machine.pace.pause_s() == pytest.approx(0.012)


def test_two_at_once_are_both_charged_before_they_are_done() -> None:
    machine = Machine(0.5)
    for _ in range(20):
        machine.frame(0.002)
    machine.now_s += 1.0
    first = machine.pace.begin()
    assert machine.pace.pause_s() == pytest.approx(0.004, rel=0.01)
    second = machine.pace.begin()
    assert machine.pace.pause_s() == pytest.approx(0.008, rel=0.01)
    machine.copied_s += 0.006
    machine.pace.done(first)
    machine.pace.done(second)
    assert machine.pace.pause_s() == pytest.approx(0.012, rel=0.01)


def test_nobody_is_installed_beside_the_step_in_which_another_joins() -> None:
    """COMMIT itself costs next to nothing, and leaves no pause behind it."""
    machine = Machine(0.5)
    for _ in range(20):
        machine.frame(0.004)
    machine.now_s += max(0.0, machine.pace.pause_s())
    charged_s = machine.pace.begin()
    machine.join_s = 0.05
    machine.pace.complete()
    machine.pace.done(charged_s)
    assert machine.pace.pause_s() == pytest.approx(0.05)
    machine.now_s += 0.05
    machine.frame(0.004)
    assert machine.pace.pause_s() == pytest.approx(0.004, rel=0.1), "and then as ever"
    machine.pace.complete()
    machine.share = None
    assert machine.pace.pause_s() == 0


def test_nothing_waits_while_there_is_nobody_to_wait_for() -> None:
    machine = Machine(None)
    assert not machine.pace.is_on
    for _ in range(5):
        machine.frame(0.002)
    assert machine.now_s == pytest.approx(0.01)
    machine.share = 0.1
    machine.frame(0.002)
    assert machine.pace.pause_s() == pytest.approx(0.018)
    machine.share = None
    assert machine.pace.pause_s() == 0


@pytest.mark.asyncio
async def test_a_paced_node_gets_all_of_it_one_frame_after_the_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sinks: list[Sink] = []  # each frame that one has installed has taken 4 ms
    pace = Pace(lambda: 0.5, lambda: 0.004 * len(sinks[0].installed), own_s=lambda: 0.0)
    ended: list[int] = []
    monkeypatch.setattr(pace, "complete", lambda: ended.append(len(sinks[0].installed)))

    def node(config: FabricConfig, staging: memoryview) -> Node:
        return Node(config, staging, pace if config.generation == 2 else None)

    monkeypatch.setattr("tests.kvfabric.rig.Node", node)
    async with open_nodes("inproc", recv_slots=8) as (prefill, decode):
        kv = random_kv(64 * 8)
        ticket, sink = expected(decode, 64 * 8)
        sinks.append(sink)
        begin = time.monotonic()
        outgoing = ship_all(prefill, ticket, Source(kv))
        for frame in range(8):
            await sink.has_installed(frame + 1)
            assert decode.stats().recv_slots_used <= 1
        await shipped(outgoing)
        await sink.commit()
        assert time.monotonic() - begin >= 8 * 0.008  # and COMMIT
        assert ended == [8], "somebody is to join now"
        assert np.array_equal(sink.kv, kv)
