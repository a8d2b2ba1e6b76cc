"""Waiting in the router, over HTTP: in whose order, how long, how many; and nothing is held."""

import asyncio
from collections import Counter
from collections.abc import Sequence

import httpx
import pytest

from router.keys import line_of, new_key
from router.room import FEW
from tests.router.conftest import RunningRouter, StartRouter
from tests.router.fake_workers import FakeCluster, GenerateCall, fake_cluster, until

GREEDY, MODEST, URGENT = new_key(), new_key(), new_key()
LINES = ";".join(
    [
        line_of(GREEDY, "greedy", ()),
        line_of(MODEST, "modest", ()),
        line_of(URGENT, "urgent", ["priority=-1"]),
    ]
)


async def ask(router: RunningRouter, key: str = "x", **body: object) -> httpx.Response:
    whole = {"model": "tiny", "prompt": "Hi", "max_tokens": 50, **body}
    head = {"Authorization": f"Bearer {key}"}
    return await router.http.post("/v1/completions", json=whole, headers=head)


class Doors:
    """Each call to a decode worker waits until it is let go; one after the other."""

    def __init__(self, cluster: FakeCluster, num: int) -> None:
        self.cluster = cluster
        self.gate = asyncio.Semaphore(0)
        worker = cluster.decodes[0]
        worker.status.max_num_seqs = 1
        worker.scripts.extend([self._one] * num)

    async def _one(self, call: GenerateCall) -> None:
        beating = asyncio.create_task(self._beat(call))
        try:
            await self.gate.acquire()
        finally:
            beating.cancel()
        await call.run_happily()

    async def _beat(self, call: GenerateCall) -> None:
        while True:
            await call.heartbeat()
            await asyncio.sleep(0.05)


async def settled(router: RunningRouter, num: int) -> None:
    """So many wait."""
    await until(lambda: router.metric("baton_admission_queue_length") == num)


CAPACITY = 1 + FEW
"""Of a fake that runs one sequence."""


async def full(router: RunningRouter, key: str = "x") -> list[asyncio.Task[httpx.Response]]:
    """As many as the cluster takes, and one that waits."""
    await until(lambda: router.router.workers.decodes[0].status.max_num_seqs == 1)
    tasks = [asyncio.create_task(ask(router, key)) for _ in range(CAPACITY + 1)]
    await settled(router, 1)
    return tasks


async def test_one_greedy_tenant_waits_for_itself(
    start_router: StartRouter, answer: Sequence[int]
) -> None:
    done: list[str] = []

    async def one(router: RunningRouter, name: str, key: str) -> None:
        response = await ask(router, key)
        assert response.status_code == 200, response.text
        done.append(name)

    async with (
        fake_cluster(answer) as cluster,
        start_router(cluster, api_keys=LINES, inactivity_s=5.0) as router,
    ):
        doors = Doors(cluster, 200)
        tasks = await full(router, GREEDY)
        tasks += [asyncio.create_task(one(router, "greedy", GREEDY)) for _ in range(39)]  # type: ignore[arg-type]
        await settled(router, 40)
        tasks += [asyncio.create_task(one(router, "modest", MODEST)) for _ in range(10)]  # type: ignore[arg-type]
        await settled(router, 50)
        assert cluster.relay.num_open_calls == CAPACITY  # who waits holds nothing
        for _ in range(60):
            doors.gate.release()
        await asyncio.gather(*tasks)
        assert Counter(done[:20])["modest"] >= 8, done
        assert router.metric("baton_admission_wait_seconds_count") == len(tasks)
        told = {"tenant": "modest", "kind": "output"}
        assert router.metric("baton_tenant_tokens_total", **told) == 10 * len(answer)


async def test_priorities_of_tenants_and_of_requests(
    start_router: StartRouter, answer: Sequence[int]
) -> None:
    done: list[str] = []

    async def one(router: RunningRouter, name: str, key: str, priority: int) -> None:
        assert (await ask(router, key, priority=priority)).status_code == 200
        done.append(name)

    async with (
        fake_cluster(answer) as cluster,
        start_router(cluster, api_keys=LINES, inactivity_s=5.0) as router,
    ):
        doors = Doors(cluster, 200)
        tasks = await full(router, MODEST)
        for num, (name, key, priority) in enumerate(
            [("later", MODEST, 1), ("plain", MODEST, 0), ("sooner", MODEST, -1), ("u", URGENT, 9)]
        ):
            tasks.append(asyncio.create_task(one(router, name, key, priority)))  # type: ignore[arg-type]
            await settled(router, num + 2)
        for _ in range(len(tasks)):
            doors.gate.release()
            await asyncio.sleep(0.07)  # so that they end one by one
        await asyncio.gather(*tasks)
        assert done == ["u", "sooner", "plain", "later"]


async def test_it_waits_so_long_and_no_longer(
    start_router: StartRouter, answer: Sequence[int]
) -> None:
    async with (
        fake_cluster(answer) as cluster,
        start_router(cluster, queue_wait_s=0.3, inactivity_s=5.0) as router,
    ):
        doors = Doors(cluster, 100)
        tasks = await full(router)
        refused = await ask(router)
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["type"] == "rate_limit_error"
        reason = {"reason": "queue_deadline"}
        await until(lambda: router.metric("baton_admission_rejections_total", **reason) == 2)
        for _ in tasks:
            doors.gate.release()
        statuses = [(await task).status_code for task in tasks]
        assert Counter(statuses) == {200: CAPACITY, 429: 1}
        assert (await ask(router)).status_code == 200


async def test_a_flood_drowns_itself_only(start_router: StartRouter, answer: Sequence[int]) -> None:
    async with (
        fake_cluster(answer) as cluster,
        start_router(cluster, api_keys=LINES, max_queue=5, inactivity_s=5.0) as router,
    ):
        doors = Doors(cluster, 200)
        greedy = await full(router, GREEDY)
        greedy += [asyncio.create_task(ask(router, GREEDY)) for _ in range(20)]
        full_queue = {"reason": "queue_full"}
        await until(lambda: router.metric("baton_admission_rejections_total", **full_queue) == 16)
        modest = [asyncio.create_task(ask(router, MODEST)) for _ in range(2)]
        await until(lambda: router.metric("baton_admission_rejections_total", **full_queue) == 18)
        for _ in (*greedy, *modest):
            doors.gate.release()
        assert [(await task).status_code for task in modest] == [200, 200]
        statuses = Counter([(await task).status_code for task in greedy])
        assert statuses == {200: CAPACITY + 3, 429: 18}


@pytest.mark.parametrize("leaves", ["waiting", "running"])
async def test_who_leaves_makes_room(
    start_router: StartRouter, answer: Sequence[int], leaves: str
) -> None:
    async with (
        fake_cluster(answer) as cluster,
        start_router(cluster, inactivity_s=5.0) as router,
    ):
        doors = Doors(cluster, 100)
        tasks = await full(router)
        if leaves == "running":
            for task in tasks[:CAPACITY]:
                task.cancel()
            await settled(router, 0)
        else:
            tasks[-1].cancel()
            await settled(router, 0)
            assert cluster.relay.num_open_calls == CAPACITY
        for _ in tasks:
            doors.gate.release()
        told = await asyncio.gather(*tasks, return_exceptions=True)
        num = sum(isinstance(one, httpx.Response) for one in told)
        assert num == (1 if leaves == "running" else CAPACITY)


async def test_the_wait_is_explained(start_router: StartRouter, answer: Sequence[int]) -> None:
    async with (
        fake_cluster(answer) as cluster,
        start_router(cluster, inactivity_s=5.0) as router,
    ):
        doors = Doors(cluster, 100)
        tasks = await full(router)
        await asyncio.sleep(0.2)
        for _ in tasks:
            doors.gate.release()
        last = (await asyncio.gather(*tasks))[-1]
        request_id = last.headers["x-baton-request-id"]
        told = (await router.http.get(f"/v1/requests/{request_id}")).json()
        assert told["parts_ms"]["line"] >= 150
        assert told["prompts"][0]["waits"]
