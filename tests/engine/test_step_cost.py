"""The fitted step-time model: it finds the truth, is sane without data, and is not led astray."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.step_cost import StepCost, StepWork, sequence_work

TRUTH = (6e-3, 4e-4, 2e-6, 3e-4, 1e-7)


def true_seconds(work: StepWork, speed: float = 1.0) -> float:
    return speed * sum(w * x for w, x in zip(TRUTH, work, strict=True))


def decodes(count: int, context: int) -> StepWork:
    return StepWork(steps=1, decodes=count, decode_context=count * context)


def mixed(count: int, context: int, first: int, chunk: int) -> StepWork:
    return decodes(count, context).plus(sequence_work(first, chunk))


def some_steps(draw: random.Random, num_steps: int) -> list[StepWork]:
    """What a busy worker does: mostly decodes, now and then the chunks of a prompt."""
    steps: list[StepWork] = []
    while len(steps) < num_steps:
        count, context = draw.randint(1, 16), draw.randint(50, 2000)
        steps += [decodes(count, context + i) for i in range(draw.randint(1, 30))]
        chunk = draw.choice((64, 128, 256, 512))
        count = draw.choice((0, count))
        steps += [mixed(count, context, i * chunk, chunk) for i in range(draw.randint(1, 6))]
    return steps[:num_steps]


def fitted(seed: int = 1, noise: float = 0.0, speed: float = 1.0) -> StepCost:
    draw, cost = random.Random(seed), StepCost()
    for work in some_steps(draw, 600):
        cost.learn(work, true_seconds(work, speed) * draw.uniform(1 - noise, 1 + noise))
    return cost


PROBES = [decodes(4, 500), mixed(4, 300, 0, 128), mixed(0, 0, 1024, 512), mixed(8, 900, 512, 64)]


@pytest.mark.parametrize("speed", [0.01, 1.0, 30.0])
@pytest.mark.parametrize("noise", [0.0, 0.2])
def test_it_finds_the_cost_whatever_the_machine_s_speed(noise: float, speed: float) -> None:
    cost = fitted(noise=noise, speed=speed)
    for work in PROBES:
        error = cost.predict(work) / true_seconds(work, speed) - 1
        assert abs(error) < (0.12 if noise else 0.05), (work, error)


def test_without_data_it_predicts_nothing_and_says_so() -> None:
    cost = StepCost()
    assert cost.predict(mixed(4, 100, 0, 512)) == 0
    assert not cost.knows_prefill
    cost.learn(decodes(2, 10), 0.01)
    assert not cost.knows_prefill
    for _ in range(4):
        assert not cost.knows_prefill
        cost.learn(mixed(0, 0, 0, 64), 0.05)
    assert cost.knows_prefill


def test_one_step_teaches_that_more_tokens_cost_more() -> None:
    cost = StepCost()
    cost.learn(mixed(0, 0, 0, 512), 0.4)
    assert cost.predict(mixed(0, 0, 0, 512)) == pytest.approx(0.4)
    assert cost.predict(mixed(0, 0, 0, 128)) < 0.2
    assert cost.predict(mixed(0, 0, 0, 1024)) > 0.7


def test_a_cold_start_is_soon_made_good() -> None:
    """The first step takes a second for two tokens; the next ones are as they always will be."""
    cost, steps = StepCost(), [mixed(0, 0, i * 128, 128) for i in range(5)]
    cost.learn(mixed(0, 0, 0, 2), 1.0)
    for work in steps:
        cost.learn(work, true_seconds(work))
    for work in steps:
        assert cost.predict(work) == pytest.approx(true_seconds(work), rel=0.3)


def test_a_stopped_process_does_not_lead_it_astray() -> None:
    cost = fitted()
    before = [cost.predict(work) for work in PROBES]
    cost.learn(decodes(4, 500), 60.0)
    cost.learn(mixed(4, 300, 0, 128), 60.0)
    for work, seconds in zip(PROBES, before, strict=True):
        assert 0.85 * seconds < cost.predict(work) < 1.25 * seconds


def test_a_lasting_change_of_speed_is_followed() -> None:
    cost, draw = fitted(), random.Random(3)
    for work in some_steps(draw, 600):
        cost.learn(work, true_seconds(work, speed=8.0))
    for work in PROBES:
        assert cost.predict(work) == pytest.approx(true_seconds(work, speed=8.0), rel=0.15)


def test_prefills_are_not_forgotten_while_there_are_none() -> None:
    cost, draw = fitted(), random.Random(5)
    before = cost.predict(PROBES[1])
    for _ in range(5000):
        work = decodes(draw.randint(3, 5), draw.randint(100, 900))
        cost.learn(work, true_seconds(work))
    assert cost.predict(PROBES[1]) == pytest.approx(before, rel=0.05)


works = st.builds(
    StepWork,
    steps=st.integers(1, 3),
    decodes=st.integers(0, 64),
    decode_context=st.integers(0, 100_000),
    prefill_tokens=st.integers(0, 2048),
    prefill_attention=st.integers(0, 10_000_000),
)
seconds = st.floats(1e-6, 100.0)


@settings(max_examples=60, deadline=None)
@given(samples=st.lists(st.tuples(works, seconds), max_size=40), work=works, more=works)
def test_never_negative_and_never_less_for_more(
    samples: list[tuple[StepWork, float]], work: StepWork, more: StepWork
) -> None:
    cost = StepCost()
    for sample, taken in samples:
        cost.learn(sample, taken)
    assert 0 <= cost.predict(work) <= cost.predict(work.plus(more)) < float("inf")


@given(parts=st.lists(st.integers(2, 50), min_size=1, max_size=6))
def test_the_work_of_chunks_adds_up_to_that_of_the_whole(parts: list[int]) -> None:
    total, done = StepWork(), 0
    for part in parts:
        total, done = total.plus(sequence_work(done, part)), done + part
    assert total == sequence_work(0, sum(parts))
