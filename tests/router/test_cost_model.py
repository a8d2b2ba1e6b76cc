"""Fits of times find what made them, and outliers do not lead them astray."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.cost_model import LINK_PRIOR, CostModel, Pace, Streams
from router.online_fit import OnlineFit

TRUE = (2e-3, 1e-3, 1e-7, 1e-4, 2e-8)
STEPS = [
    (1, b, b * c, n, n * n // 2) for b in (0, 1, 4, 9) for c in (50, 900) for n in (0, 64, 500)
]


def seconds_of(work: tuple[int, ...]) -> float:
    return sum(w * x for w, x in zip(TRUE, work, strict=True))


def fitted(every: int = 0, factor: float = 1.0, prior: tuple[float, ...] = ()) -> OnlineFit:
    """Every so manyth sample is off by that factor."""
    fit = OnlineFit(5, prior)
    for index in range(300):
        work = STEPS[index * 7 % len(STEPS)]
        off = factor if every and index % every == every - 1 else 1.0
        fit.learn(work, seconds_of(work) * off)
    return fit


@pytest.mark.parametrize("prior", [(), TRUE, tuple(w * 3 for w in TRUE)])
def test_it_finds_what_made_the_times(prior: tuple[float, ...]) -> None:
    fit = fitted(prior=prior)
    for work in STEPS:
        assert fit.predict(work) == pytest.approx(seconds_of(work), rel=0.1)


def test_outliers_move_it_little_and_a_change_is_followed() -> None:
    fit = fitted(every=10, factor=100.0)
    for work in STEPS:
        assert fit.predict(work) < 1.6 * seconds_of(work)
    for index in range(60):  # everything takes thrice as long from now on
        work = STEPS[index * 7 % len(STEPS)]
        fit.learn(work, 3 * seconds_of(work))
    for work in STEPS:
        assert fit.predict(work) == pytest.approx(3 * seconds_of(work), rel=0.25)


amounts = st.tuples(*[st.integers(0, 10_000)] * 5)


@given(st.lists(st.tuples(amounts, st.floats(1e-6, 1e3)), max_size=30), amounts, amounts)
def test_no_prediction_is_negative_or_falls_with_more_work(
    samples: list[tuple[tuple[int, ...], float]], work: tuple[int, ...], more: tuple[int, ...]
) -> None:
    fit = OnlineFit(5)
    for features, seconds in samples:
        fit.learn(features, seconds)
    total = [one + other for one, other in zip(work, more, strict=True)]
    assert 0 <= fit.predict(work) <= fit.predict(total) < float("inf")


def total_s(
    costs: CostModel, address: str, num_tokens: int, num_cached: int, token_budget: int = 512
) -> float:
    found = costs.prefill_s(address, num_tokens, num_cached, Pace(token_budget))
    assert found is not None
    return found.total


def test_a_worker_is_what_it_tells_until_its_sums_say_otherwise() -> None:
    costs = CostModel()
    worker = costs.worker("p")
    assert costs.prefill_s("p", 100, 0, Pace(512)) is None
    worker.told(TRUE, (0, 0, 0, 0, 0), 0.0)
    assert costs.prefill_s("p", 100, 0, Pace(512)) is None  # it has computed no prompt yet
    worker.told(TRUE, (1, 0, 0, 64, 2080), seconds_of((1, 0, 0, 64, 2080)))
    expected = seconds_of((2, 0, 0, 900, 900 * 100 + 900 * 901 // 2))
    assert total_s(costs, "p", 1000, 100) == pytest.approx(expected, rel=0.01)
    assert worker.step_s(Streams(3, 200)) == pytest.approx(seconds_of((1, 3, 200, 0, 0)), rel=0.01)
    sums, total = [1, 0, 0, 64, 2080], seconds_of((1, 0, 0, 64, 2080))
    for index in range(80):  # what it does takes twice what its own fit says
        work = STEPS[index * 7 % len(STEPS)]
        sums = [a + b for a, b in zip(sums, work, strict=True)]
        total += 2 * seconds_of(work)
        worker.told(TRUE, sums, total)
    assert total_s(costs, "p", 1000, 100) == pytest.approx(2 * expected, rel=0.2)
    samples = worker.fit.num_samples
    worker.told(TRUE, (1, 0, 0, 64, 2080), 0.1)  # another process: no work is negative
    assert worker.fit.num_samples == samples


def test_streams_beside_a_prompt_make_it_slower_and_wait_for_its_own_part() -> None:
    costs = CostModel()
    costs.worker("d").told(TRUE, (1, 0, 0, 64, 2080), 0.01)
    streams = Streams(8, 4000)
    own = seconds_of((0, 0, 0, 1024, 1024 * 1025 // 2))
    step = seconds_of((1, 8, 4000, 0, 0))
    assert total_s(costs, "d", 1024, 0, 256) == pytest.approx(own + 4 * TRUE[0], rel=0.01)
    found = costs.prefill_s("d", 1024, 0, Pace(256), streams)
    assert found == pytest.approx((own + 4 * step, own), rel=0.01)
    # An objective for the step leaves room for a tile of 16 tokens, or more, or for none.
    token_s = own / 1024
    for left, num_steps in ((1.5, 64), (2.5, 32), (-1.0, 64), (99, 4)):
        pace = Pace(256, step + left * 16 * token_s)
        found = costs.prefill_s("d", 1024, 0, pace, streams)
        assert found == pytest.approx((own + num_steps * step, own), rel=0.01)
    alone = costs.prefill_s("d", 1024, 0, Pace(256, 1e-3))  # nobody waits for the steps
    assert alone is not None
    assert alone.total == total_s(costs, "d", 1024, 0, 256)


def test_a_fit_that_a_probe_has_taught_is_one() -> None:
    costs = CostModel()
    costs.worker("p").told(TRUE, (0, 0, 0, 0, 0), 0.0, knows_prefill=True)
    assert total_s(costs, "p", 100, 0) == pytest.approx(seconds_of((1, 0, 0, 100, 5050)))
    costs = CostModel()
    costs.worker("q").told((0.0,) * 5, (0, 0, 0, 0, 0), 0.0, knows_prefill=True)
    assert costs.prefill_s("q", 100, 0, Pace(512)) is None  # it says so, and tells nothing


def test_who_has_computed_no_prompt_is_taken_for_one_of_its_kind() -> None:
    costs = CostModel(kind_of=lambda address: address[:1].encode())
    costs.worker("a1").told(TRUE, (1, 0, 0, 64, 2080), 0.01)
    costs.worker("a2").told((9e-3, 1e-3, 1e-7, 0, 0), (5, 5, 99, 0, 0), 0.01)
    costs.worker("b1")
    assert costs.prefill_s("b1", 100, 0, Pace(512)) is None
    expected = 9e-3 + 100 * TRUE[3] + 5050 * TRUE[4]  # its own steps, the other's prefill
    assert total_s(costs, "a2", 100, 0) == pytest.approx(expected)


def test_a_link_is_a_line_over_bytes() -> None:
    costs = CostModel()
    assert costs.link("p", "d").predict((1, 10**9)) == pytest.approx(LINK_PRIOR[0] + 1)
    for nbytes in (10**6, 10**7, 10**8) * 30:
        costs.link("p", "d").learn((1, nbytes), 5e-3 + nbytes * 4e-9)
    assert costs.link("p", "d").predict((1, 5 * 10**7)) == pytest.approx(0.205, rel=0.05)
    assert costs.link("p", "e").predict((1, 10**9)) == pytest.approx(LINK_PRIOR[0] + 1)


def test_a_link_begins_with_what_the_fabric_was_found_to_do() -> None:
    costs = CostModel()
    before = costs.link("p", "d")
    costs.told_link("d", 0)
    assert before.predict((1, 10**9)) == pytest.approx(LINK_PRIOR[0] + 1)
    costs.told_link("d", 4e9)
    for link in (before, costs.link("q", "d")):
        assert link.predict((1, 10**9)) == pytest.approx(LINK_PRIOR[0] + 0.25)
    assert costs.link("p", "e").predict((1, 10**9)) == pytest.approx(LINK_PRIOR[0] + 1)
    for _ in range(60):
        before.learn((1, 10**8), 0.08)
        costs.told_link("d", 4e9)  # each state says it again
    assert before.predict((1, 10**8)) == pytest.approx(0.08, rel=0.1)
