import threading
import time
from collections.abc import Iterator

import pytest

from engine.errors import EngineStopped, OutOfDeviceMemory, UnknownRequest
from engine.request import (
    EngineEvent,
    FinishReason,
    Leg,
    RequestFailed,
    RequestId,
    TokensOut,
)
from engine.sequence import Sequence
from tests.engine.loop_rig import DEADLINE_S, Rig, build_rig, wait_until
from tests.engine.requests import make_request

R = RequestId("r")


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = build_rig()
    rig.loop.start()
    yield rig
    rig.loop.stop()


def test_a_step_out_of_memory_fails_its_requests_and_no_others(rig: Rig) -> None:
    def out_of_memory(seqs: list[Sequence]) -> None:
        rig.runner.before_step = lambda seqs: None
        raise OutOfDeviceMemory("no room for activations")

    rig.runner.before_step = out_of_memory
    rig.loop.submit(make_request("bad"))
    assert rig.listener.wait_ended(RequestId("bad")) is None
    rig.loop.submit(make_request("good"))
    assert rig.listener.wait_ended(RequestId("good")) is FinishReason.LENGTH
    rig.wait_free()


def test_a_fatal_step_fails_everything_once_and_stops_the_engine(rig: Rig) -> None:
    def broken(seqs: list[Sequence]) -> None:
        queued.wait(DEADLINE_S)
        raise ValueError("device lost")

    queued = threading.Event()
    rig.loop.submit(make_request("held", leg=Leg.PREFILL, max_tokens=1))
    rig.listener.wait_for(TokensOut, RequestId("held"))
    rig.runner.before_step = broken
    rig.loop.submit(make_request("running"))
    rig.loop.submit(make_request("reserved", leg=Leg.DECODE))
    claim = rig.loop.claim(RequestId("unknown"))
    queued.set()
    for name in ("running", "reserved"):
        assert rig.listener.wait_ended(RequestId(name)) is None
        failed = rig.listener.of(RequestFailed, RequestId(name))
        assert [event.error for event in failed] == ["ValueError('device lost')"]
    assert rig.listener.of(RequestFailed, RequestId("held")) == []  # it had ended
    assert isinstance(claim.exception(DEADLINE_S), UnknownRequest)
    rig.loop.stop()
    assert isinstance(rig.loop.failure, ValueError)
    assert rig.loop.stats().blocks.unused == rig.loop.num_blocks
    with pytest.raises(EngineStopped):
        rig.loop.submit(make_request("late"))
    with pytest.raises(EngineStopped):
        rig.loop.claim(R).result(0)
    rig.loop.abort(R)
    rig.loop.attach(R, 1)


def test_a_listener_that_fails_stops_the_engine() -> None:
    rig = build_rig()

    def react(event: EngineEvent) -> None:
        raise RuntimeError("listener")

    rig.listener.react = react
    rig.loop.start()
    rig.loop.submit(make_request())
    wait_until(lambda: rig.loop.failure is not None)
    rig.loop.stop()
    assert rig.loop.stats().blocks.unused == rig.loop.num_blocks


def test_stop_fails_what_is_left_and_can_be_repeated(rig: Rig) -> None:
    rig.runner.before_step = lambda seqs: time.sleep(0.005)
    rig.loop.submit(make_request(max_tokens=200))
    rig.loop.submit(make_request("waits", leg=Leg.DECODE))
    rig.listener.wait_for(TokensOut, R)
    rig.loop.stop()
    rig.loop.stop()
    for name in ("r", "waits"):
        failed = rig.listener.of(RequestFailed, RequestId(name))
        assert [event.error for event in failed] == ["the engine stopped"]
    assert rig.loop.failure is None
    assert rig.loop.stats().blocks.unused == rig.loop.num_blocks


def test_stop_before_start_fails_what_was_submitted() -> None:
    rig = build_rig()
    rig.loop.submit(make_request())
    rig.loop.stop()
    assert rig.listener.wait_ended(R) is None
    with pytest.raises(EngineStopped):
        rig.loop.submit(make_request())
