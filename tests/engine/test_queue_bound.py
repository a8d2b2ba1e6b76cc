"""A prefill queue is as long as its bound in predicted milliseconds, whatever the machine."""

import pytest

from engine.errors import QueueFull
from engine.prefill_order import PrefillPolicy
from engine.request import Leg
from engine.step_cost import StepWork
from tests.engine.known_cost import make_known
from tests.engine.requests import make_request
from tests.engine.scheduler_drive import Drive

PER_STEP, PER_TOKEN = 0.01, 0.001


def drive_of(policy: PrefillPolicy = "fcfs", speed: float = 1.0) -> Drive:
    drive = Drive.build(
        num_blocks=1000,
        block_size=16,
        token_budget=100,
        prefill_policy=policy,
        max_queue_s=1.0 * speed,
    )
    make_known(drive.scheduler.cost, [PER_STEP * speed, 0, 0, PER_TOKEN * speed, 0])
    return drive


def fill(drive: Drive, prompt_len: int, leg: Leg = Leg.PREFILL) -> int:
    """Submits until the queue is full."""
    for index in range(100):
        try:
            name = f"{drive.num_submitted}"
            drive.submit(make_request(name, prompt_len=prompt_len, leg=leg))
        except QueueFull:
            return index
    return 100


@pytest.mark.parametrize("speed", [0.001, 1.0, 50.0])
def test_as_many_come_in_as_the_bound_says(speed: float) -> None:
    drive = drive_of(speed=speed)
    # 100 tokens and their step cost 0.11 of the bound: the 10 before the 11th still fit not.
    assert fill(drive, 100) == 10
    assert drive.scheduler.queue_s == pytest.approx(1.1 * speed)
    assert drive.scheduler.queue_bound.num_refused == 1
    drive.step()
    assert fill(drive, 100) == 1


def test_a_refusal_says_how_long_and_leaves_nothing() -> None:
    drive = drive_of()
    fill(drive, 100)
    with pytest.raises(QueueFull, match=r"would wait 1100 ms .* at most 1000 ms") as caught:
        drive.submit(make_request("one more", prompt_len=5, leg=Leg.PREFILL))
    assert caught.value.retry_after_s == pytest.approx(0.1)
    assert drive.scheduler.num_waiting == 10
    drive.check()


def test_shortest_first_refuses_only_who_would_wait_so_long() -> None:
    drive = drive_of("srf")
    fill(drive, 200)
    drive.submit(make_request("short", prompt_len=5, leg=Leg.PREFILL))
    with pytest.raises(QueueFull):
        drive.submit(make_request("long", prompt_len=900, leg=Leg.PREFILL))


@pytest.mark.parametrize("leg", [Leg.LOCAL, Leg.DECODE])
def test_only_prefill_legs_are_refused(leg: Leg) -> None:
    assert fill(drive_of(), 100, leg) == 100


def test_nothing_is_refused_before_enough_was_measured() -> None:
    drive = Drive.build(num_blocks=1000, block_size=16, token_budget=100, max_queue_s=1.0)
    drive.scheduler.cost.learn(StepWork(steps=1, prefill_tokens=2, prefill_attention=3), 5.0)
    assert fill(drive, 100) == 100
    assert drive.scheduler.queue_s == 0


def test_one_prompt_of_any_length_comes_into_an_empty_queue() -> None:
    drive = Drive.build(num_blocks=1000, block_size=16, max_queue_s=0.001, max_model_len=20000)
    make_known(drive.scheduler.cost, [1.0] * 5)
    assert fill(drive, 10000) == 1


def test_what_the_cache_has_is_no_wait() -> None:
    drive = Drive.build(
        num_blocks=1000, block_size=4, token_budget=100, prefix_caching=True, max_queue_s=1.0
    )
    make_known(drive.scheduler.cost, [0, 0, 0, PER_TOKEN, 0])
    first = drive.submit(make_request("first", prompt_len=100, max_tokens=1))
    drive.step()
    assert first.finish_reason is not None
    assert fill(drive, 100) > 50  # each has a block left to compute
