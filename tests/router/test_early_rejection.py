"""Requests that load makes miss their objective: which, why, until when; and over HTTP."""

import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protos import serving_pb2 as pb
from router.cost_model import Streams
from router.decode_forecast import DecodeForecast
from router.early_rejection import LONGEST_S, Times, judge
from router.objective import Objective
from tests.router.conftest import RunningRouter, StartRouter
from tests.router.fake_workers import FakeCluster, fake_cluster, until

IDLE = Times(0.2, 0.02)


def test_within_the_objective_nobody_is_refused() -> None:
    assert judge(Objective(1.0, 0.1), Times(1.0, 0.1), IDLE, 10) is None
    assert judge(Objective(), Times(1e6, 1e6), IDLE, 10) is None


def test_a_queue_is_worked_off_a_second_each_second() -> None:
    miss = judge(Objective(1.0), Times(3.5, 0.1), IDLE, 10)
    assert miss is not None
    assert (miss.reason, miss.retry_after_s) == ("slo_ttft", 2.5)


def test_a_batch_is_worked_off_by_the_life_of_its_streams() -> None:
    miss = judge(Objective(tpot_s=0.04), Times(1.0, 0.02 + 0.02 * math.e), IDLE, 10)
    assert miss is not None
    assert miss.reason == "slo_tpot"
    assert miss.retry_after_s == pytest.approx(10)


def test_what_idle_workers_miss_too_is_not_a_matter_of_load() -> None:
    assert judge(Objective(0.1, 0.01), Times(9.0, 9.0), IDLE, 10) is None
    miss = judge(Objective(0.1, 0.05), Times(9.0, 9.0), IDLE, 10)  # but the other one may be
    assert miss is not None
    assert miss.reason == "slo_tpot"


TIMES = st.builds(Times, st.floats(0, 100), st.floats(0, 10))


@given(TIMES, TIMES, st.floats(0.01, 100), st.floats(0.001, 10), st.floats(0, 100))
def test_it_is_monotone_in_load(
    loaded: Times, idle: Times, ttft_s: float, tpot_s: float, more: float
) -> None:
    objective = Objective(ttft_s, tpot_s)
    heavier = Times(loaded.ttft_s + more, loaded.tpot_s + more)
    before, after = (judge(objective, one, idle, 10) for one in (loaded, heavier))
    assert before is None or after is not None
    for miss in (before, after):
        assert miss is None or 0 <= miss.retry_after_s <= LONGEST_S


def test_a_forecast_lets_streams_end_and_those_under_way_come() -> None:
    running = DecodeForecast(40, life_s=10)
    assert running.most_from(0) == 40
    p = 1 / math.e
    assert running.most_from(10) == pytest.approx(40 * p + math.sqrt(40 * p * (1 - p)))
    coming = DecodeForecast(0, life_s=10, joining=(5.0,) * 40)
    assert coming.most_from(0) == 40  # whoever comes now will run beside them
    assert coming.most_from(5) == 40
    assert coming.most_from(15) == pytest.approx(running.most_from(10))
    assert DecodeForecast(3, life_s=0, joining=(0.0, 9.0)).most_from(5) == 5
    assert DecodeForecast(30, 10, context=100).from_then(0) == Streams(30, 3000)


JOINING = st.lists(st.floats(-5, 100), max_size=20).map(tuple)


@given(st.integers(0, 100), st.floats(0, 1e3), JOINING, st.floats(0, 200), st.floats(-5, 100))
def test_a_forecast_is_bounded_falls_and_is_monotone_in_load(
    running: int, life_s: float, joining: tuple[float, ...], after_s: float, one_more: float
) -> None:
    forecast = DecodeForecast(running, life_s, joining)
    num = forecast.most_from(after_s)
    most = running + len(joining)
    assert 0 <= num <= most + math.sqrt(most) / 2 + 1e-9
    fuller = DecodeForecast(running + 1, life_s, joining).most_from(after_s)
    assert fuller >= num - 1e-9
    assert DecodeForecast(running, life_s, (*joining, one_more)).most_from(after_s) >= num - 1e-9


def tell(cluster: FakeCluster, *, queue_ms: int = 0, num_running: int = 0) -> None:
    """A millisecond a token of a prompt; steps of a millisecond for each stream."""
    for fake in cluster.workers:
        fake.steps = pb.StepTimes(
            weights=(1e-4, 1e-3, 0, 1e-3, 0), work=(1, 0, 0, 9, 45), knows_prefill=True
        )
        fake.status.block_size, fake.status.num_blocks, fake.status.token_budget = 2, 99, 64
    cluster.prefills[0].status.queue_ms = queue_ms
    cluster.decodes[0].status.queue_ms = queue_ms
    cluster.decodes[0].status.num_running = num_running


async def heard(router: RunningRouter) -> None:
    workers = router.router.workers.everyone
    seen = [worker.num_refreshes for worker in workers]
    await until(lambda: all(w.num_refreshes > n + 1 for w, n in zip(workers, seen, strict=True)))


async def ask(router: RunningRouter, ttft_ms: str, tpot_ms: str = "0") -> tuple[int, str]:
    body = {"model": "tiny", "prompt": "Hi", "max_tokens": 50}
    head = {"x-slo-ttft-ms": ttft_ms, "x-slo-tpot-ms": tpot_ms}
    response = await router.http.post("/v1/completions", json=body, headers=head)
    assert response.status_code in (200, 429)
    return response.status_code, response.headers.get("retry-after", "")


async def test_load_refuses_and_says_for_how_long(
    start_router: StartRouter, answer: Sequence[int]
) -> None:
    async with fake_cluster(answer) as cluster, start_router(cluster) as router:
        tell(cluster, queue_ms=30_000, num_running=1)
        await heard(router)
        status, retry_after = await ask(router, "5000")
        assert status == 429
        assert 20 <= int(retry_after) <= 26
        assert router.metric("baton_admission_rejections_total", reason="slo_ttft") == 1
        assert not cluster.decodes[0].requests
        assert (await ask(router, "60000"))[0] == 200
        assert (await ask(router, "0"))[0] == 200  # no objective
        assert (await ask(router, "0.001"))[0] == 200  # which nobody could meet
        met = {"objective": "ttft"}
        assert router.metric("baton_objectives_total", outcome="met", **met) == 1
        assert router.metric("baton_objectives_total", outcome="missed", **met) == 1

        tell(cluster, num_running=90)
        await heard(router)
        assert (await ask(router, "0", "50"))[0] == 429
        assert router.metric("baton_admission_rejections_total", reason="slo_tpot") == 1
        tell(cluster)
        await heard(router)
        assert (await ask(router, "0", "50"))[0] == 200


async def test_an_idle_cluster_refuses_nobody_and_a_flag_turns_it_off(
    start_router: StartRouter, answer: Sequence[int]
) -> None:
    async with fake_cluster(answer) as cluster:
        tell(cluster, queue_ms=30_000)  # says so, though nothing runs
        async with start_router(cluster) as router:
            await heard(router)
            assert (await ask(router, "5000"))[0] == 200
        tell(cluster, queue_ms=30_000, num_running=1)
        async with start_router(cluster, early_rejection=False) as router:
            await heard(router)
            assert (await ask(router, "5000"))[0] == 200
