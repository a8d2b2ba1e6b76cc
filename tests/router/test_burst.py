"""Very many at once, and very many that are wrong: each is answered or told when to come back."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import aiohttp
import grpc
from prometheus_client import CollectorRegistry

from protos import serving_pb2 as pb
from router.app import Router
from router.tokenizer import TextTokenizer
from tests.router.conftest import RunningRouter, StartRouter
from tests.router.fake_workers import FakeCluster, GenerateCall, fake_cluster, until

NUM = 512
PATIENT = {
    "inactivity_s": 20.0,
    "status_timeout_s": 20.0,
    "request_timeout_s": 60.0,
    "ready_wait_s": 20.0,
}


class Told(NamedTuple):
    status: int
    retry_after: str
    text: str


async def ask(client: aiohttp.ClientSession, index: int) -> Told:
    body = {"model": "tiny", "prompt": f"Hi {index}", "max_tokens": 50, "stream": index % 2 == 1}
    async with client.post("/v1/completions", json=body) as response:
        text = await response.text()
        return Told(response.status, response.headers.get("Retry-After", ""), text)


def small(cluster: FakeCluster) -> None:
    for fake in cluster.decodes:
        fake.status.max_num_seqs = 16


def many(router: RunningRouter) -> aiohttp.ClientSession:
    """A client whose own work does not grow with the square of its connections."""
    connector = aiohttp.TCPConnector(limit=0)
    return aiohttp.ClientSession(router.url, connector=connector)


def gauges(router: RunningRouter) -> list[float]:
    names = "baton_requests_in_flight", "baton_admission_queue_length"
    return [router.metric(name) for name in names]


async def test_512_at_once_and_a_second_router_in_the_midst(
    start_router: StartRouter, answer: Sequence[int], tokenizer: TextTokenizer
) -> None:
    async with fake_cluster(answer, num_prefills=2, num_decodes=2) as cluster:
        small(cluster)
        stored = pb.CacheChanges(next_change=3, is_snapshot=True, stored=[7, 8, 9])
        cluster.decodes[1].snapshot = stored
        async with start_router(cluster, max_queue=400, **PATIENT) as first:
            await until(lambda: len(known(first.router)) == 4, 20.0)
            async with many(first) as client:
                asked = [asyncio.create_task(ask(client, index)) for index in range(NUM)]
                await until(lambda: first.metric("baton_admission_queue_length") > 0, 20.0)
                second = Router(first.router.config, tokenizer, CollectorRegistry())
                second.workers.start()
                try:
                    await until(lambda: known(second) == known(first.router), 2.0)
                finally:
                    second.grammars.close()
                    await second.workers.close()
                told = await asyncio.gather(*asked)
            statuses = Counter(one.status for one in told)
            assert set(statuses) <= {200, 429}, statuses
            refused = [one for one in told if one.status == 429]
            assert all(int(one.retry_after) >= 1 for one in refused)
            streamed = [one.text for one in told if one.text.startswith("data:")]
            assert all(text.endswith("data: [DONE]\n\n") for text in streamed)
            by_reason = [
                first.metric("baton_admission_rejections_total", reason=reason)
                for reason in ("queue_full", "queue_deadline")
            ]
            assert sum(by_reason) == len(refused)
            await until(lambda: gauges(first) == [0, 0], 2.0)
            assert first.metric("baton_breakers_open", role="decode") == 0
            assert [worker.load for worker in first.router.workers.everyone] == [0] * 4


def known(router: Router) -> set[tuple[str, int, int]]:
    """Of the workers that it would send requests to."""
    return {
        (one.name, one.status.max_num_seqs, len(one.index))
        for one in router.workers.everyone
        if one.is_ready
    }


async def refuse(call: GenerateCall) -> None:
    await call.fail(grpc.StatusCode.INVALID_ARGUMENT, "the prompt needs 9 blocks of 8")


async def test_twenty_400s_in_a_row_open_no_breaker(
    start_router: StartRouter, answer: Sequence[int]
) -> None:
    async with fake_cluster(answer) as cluster, start_router(cluster, **PATIENT) as router:
        wrong: list[dict[str, object]] = [
            {"max_tokens": 0},
            {"prompt": "x" * 1000},
            {"temperature": "hot"},
            {"priority": 1.5},
        ]
        for body in wrong * 5:
            assert (await router.complete(**body)).status_code == 400
        (decode,) = cluster.decodes
        decode.scripts.extend([refuse] * 20)  # what only a worker can know
        for _ in range(20):
            assert (await router.complete()).status_code == 400
        for role in ("decode", "prefill"):
            assert router.metric("baton_breakers_open", role=role) == 0
            assert router.metric("baton_workers_ready", role=role) == 1
        assert (await router.complete()).status_code == 200
        assert gauges(router) == [0, 0]


async def test_who_floods_and_leaves_leaves_nothing(
    start_router: StartRouter, answer: Sequence[int]
) -> None:
    async with fake_cluster(answer) as cluster, start_router(cluster, **PATIENT) as router:
        small(cluster)
        await until(lambda: router.router.workers.decodes[0].status.max_num_seqs == 16, 20.0)
        async with many(router) as client:
            asked = [asyncio.create_task(ask(client, index)) for index in range(200)]
            await until(lambda: router.metric("baton_admission_queue_length") > 20, 20.0)
            for task in asked:
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)
        await until(lambda: gauges(router) == [0, 0], 20.0)
        assert (await router.complete()).status_code == 200
