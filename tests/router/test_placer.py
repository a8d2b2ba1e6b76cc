"""The router sends a prompt the way that is predicted to cost least, says so, and learns."""

import asyncio
from dataclasses import replace

import pytest

from protos import serving_pb2 as pb
from router.cost_model import CostModel
from router.prefix_index import PromptBlocks
from router.request import ValidPrompt
from router.workers import Worker
from tests.router.conftest import StartRouter
from tests.router.dispatch_bench import ANSWER, Bench, StartBench, make_prompt
from tests.router.fake_workers import FakeCluster, fake_cluster, until

FAST = (1e-3, 1e-3, 0.0, 1e-3, 0.0)
SLOW = (1e-3, 1e-3, 0.0, 1.0, 0.0)


def tell(fake: object, weights: tuple[float, ...], **status: int) -> None:
    """It has computed some prompt, in no time of its own."""
    fake.steps = pb.StepTimes(weights=weights, work=(1, 0, 0, 9, 45))  # type: ignore[attr-defined]
    for name, value in {"block_size": 2, "num_blocks": 99, "token_budget": 64, **status}.items():
        setattr(fake.status, name, value)  # type: ignore[attr-defined]


async def heard(bench: Bench) -> None:
    everyone: list[Worker] = [*bench.workers.decodes, *bench.workers.prefills]
    seen = [worker.num_refreshes for worker in everyone]
    await until(lambda: all(w.num_refreshes > n + 1 for w, n in zip(everyone, seen, strict=True)))


def costs_of(bench: Bench) -> CostModel:
    return bench.dispatcher.placer.costs


def ways(bench: Bench) -> tuple[int, int]:
    """Prompts computed remote and local so far."""
    local = sum(request.local_prefill for request in bench.cluster.decodes[0].requests)
    return len(bench.cluster.decodes[0].requests) - local, local


def long_prompt(length: int = 90) -> ValidPrompt:
    return replace(make_prompt(), token_ids=tuple(range(length)))


async def test_the_choice_moves_with_what_workers_measure(start_bench: StartBench) -> None:
    async with start_bench() as bench:
        prefill, decode = bench.cluster.prefills[0], bench.cluster.decodes[0]
        await bench.run(long_prompt())
        assert ways(bench) == (1, 0)  # nothing is known: nobody guesses
        tell(prefill, FAST)
        tell(decode, SLOW)
        await heard(bench)
        client = await bench.run(long_prompt())
        assert client.token_ids == list(ANSWER)
        assert ways(bench) == (2, 0)
        tell(prefill, SLOW)
        tell(decode, FAST)
        await heard(bench)
        client = await bench.run(long_prompt())
        assert client.token_ids == list(ANSWER)
        assert ways(bench) == (2, 1)
        assert decode.requests[-1].local_prefill_reason == "cheaper_here"
        reason = {"reason": "cheaper_here"}
        assert bench.registry.get_sample_value("baton_local_prefills_total", reason) == 1


async def test_a_prompt_that_decode_has_stays_there(start_bench: StartBench) -> None:
    async with start_bench() as bench:
        prefill, decode = bench.cluster.prefills[0], bench.cluster.decodes[0]
        tell(prefill, (0.0, 0.0, 0.0, 1e-3, 0.0))
        tell(decode, (0.0, 0.0, 0.0, 2e-3, 0.0))
        await heard(bench)
        prompt = long_prompt()
        await bench.run(prompt)
        assert ways(bench) == (1, 0)
        stored = list(PromptBlocks(prompt.token_ids).of(decode.status.fingerprint, 2))
        decode.caches.append(pb.CacheChanges(is_snapshot=True, next_change=1, stored=stored))
        await until(lambda: len(bench.workers.decodes[0].index) == len(stored) == 44)
        await bench.run(prompt)
        assert ways(bench) == (1, 1)


@pytest.mark.parametrize("prefill_at", ["remote", "local"])
async def test_the_way_can_be_forced(start_bench: StartBench, prefill_at: str) -> None:
    async with start_bench(prefill_at=prefill_at) as bench:
        is_local = prefill_at == "local"
        tell(bench.cluster.prefills[0], FAST if is_local else SLOW)
        tell(bench.cluster.decodes[0], SLOW if is_local else FAST)
        await heard(bench)
        for max_tokens in (50, 1):
            client = await bench.run(make_prompt(max_tokens))
            assert client.token_ids == list(ANSWER[:max_tokens])
        requests = bench.cluster.decodes[0].requests
        reason = "forced_local" if is_local else ""
        assert {request.local_prefill_reason for request in requests} == {reason}
        assert len(bench.cluster.prefills[0].requests) == (0 if is_local else 2)


async def test_prompts_of_one_moment_are_spread(start_bench: StartBench) -> None:
    """Before any worker has told of the first of them."""
    async with start_bench(num_prefills=3, prefill_at="remote") as bench:
        for fake in bench.cluster.workers:
            tell(fake, (0.0, 0.0, 0.0, 0.1, 0.0))
        await heard(bench)
        await asyncio.gather(*(bench.run(long_prompt()) for _ in range(6)))
        assert [len(fake.requests) for fake in bench.cluster.prefills] == [2, 2, 2]


async def test_what_came_of_it_is_learned(start_bench: StartBench) -> None:
    async with start_bench() as bench:
        tell(bench.cluster.prefills[0], FAST)
        tell(bench.cluster.decodes[0], SLOW)
        await heard(bench)
        way = costs_of(bench).way(
            bench.workers.prefills[0].address, bench.workers.decodes[0].address
        )
        await bench.run(long_prompt())
        assert way.num_samples == 1
        saved = {"way": "remote"}
        name = "baton_disaggregation_saved_seconds"
        assert bench.registry.get_sample_value(f"{name}_count", saved) == 1
        total = bench.registry.get_sample_value(f"{name}_sum", saved)
        assert total is not None
        assert 85 < total < 95  # 90 tokens at a second each


async def test_the_explanation_tells_both_ways(
    answer: tuple[int, ...], start_router: StartRouter
) -> None:
    async with fake_cluster(answer, num_prefills=2) as cluster:
        assert isinstance(cluster, FakeCluster)
        for fake in cluster.prefills:
            tell(fake, FAST)
        tell(cluster.decodes[0], SLOW)
        async with start_router(cluster) as running:
            response = await running.complete()
            request_id = response.headers["x-baton-request-id"]
            told = (await running.http.get(f"/v1/requests/{request_id}")).json()
    (attempt,) = told["prompts"][0]["attempts"]
    choice = attempt["choice"]
    assert choice["taken"]["prefill"] in {fake.address for fake in cluster.prefills}
    assert choice["other"]["prefill"] is None
    assert choice["taken"]["cost_ms"] < choice["other"]["cost_ms"]
    assert choice["saved_ms"] > 0
    candidates = attempt["prefills"][0]["candidates"]
    assert [one["cost_ms"] is not None for one in candidates] == [True, True]
    assert [one["why"] for one in candidates] == ["taken", "later_name"]


@pytest.mark.parametrize("by_header", [True, False])
async def test_requests_of_a_session_stay_together(
    answer: tuple[int, ...], start_router: StartRouter, by_header: bool
) -> None:
    async with fake_cluster(answer, num_prefills=4) as cluster:
        for fake in cluster.workers:
            tell(fake, FAST)
        # Hard: a hiccup of a call here takes longer than computing these prompts would. And on a
        # busy machine longer than the silence that other tests allow: a retry goes elsewhere.
        flags = {"prefill_at": "remote", "session_affinity": "hard", "inactivity_s": 4.0}
        async with start_router(cluster, **flags) as running:
            everyone = running.router.workers.everyone
            await until(lambda: all(worker.is_ready for worker in everyone), timeout_s=20)
            for session in ("ann", "ben", "cid"):
                before = [len(fake.requests) for fake in cluster.prefills]
                for _ in range(5):
                    if by_header:
                        body = {"model": "tiny", "prompt": "Hi", "max_tokens": 50}
                        head = {"x-session-id": session}
                        await running.http.post("/v1/completions", json=body, headers=head)
                    else:
                        await running.complete(user=session)
                after = [len(fake.requests) for fake in cluster.prefills]
                grown = [b - a for a, b in zip(before, after, strict=True)]
                assert sorted(grown) == [0, 0, 0, 5]
