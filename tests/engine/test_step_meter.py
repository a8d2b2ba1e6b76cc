from engine.step_cost import StepCost, StepWork
from engine.step_meter import StepMeter

PREFILL = StepWork(steps=1, prefill_tokens=100, prefill_attention=5050)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_measured_and_predicted_are_summed() -> None:
    clock = Clock()
    meter = StepMeter(StepCost(), is_async=False, clock=clock)
    for _ in range(2):
        meter.begin()
        clock.now += 0.5
        meter.end(PREFILL, is_waited_for=False)
    assert (meter.measured_s, meter.predicted_s, meter.error_s) == (1.0, 0.5, 0.5)


def test_steps_that_nobody_waits_for_are_measured_with_the_next() -> None:
    clock, cost = Clock(), StepCost()
    meter = StepMeter(cost, is_async=True, clock=clock)
    for _ in range(3):
        meter.begin()
        clock.now += 0.001  # queued, not done
        meter.end(PREFILL, is_waited_for=False)
    assert meter.measured_s == 0
    meter.begin()
    clock.now += 1.997
    meter.end(PREFILL, is_waited_for=True)
    assert cost.predict(PREFILL) * 4 == meter.measured_s == 2.0


def test_idle_time_and_failed_steps_are_no_measurement() -> None:
    clock = Clock()
    meter = StepMeter(StepCost(), is_async=False, clock=clock)
    meter.begin()
    clock.now += 100.0
    meter.drop()
    meter.begin()
    clock.now += 0.5
    meter.end(PREFILL, is_waited_for=True)
    assert meter.measured_s == 0.5
