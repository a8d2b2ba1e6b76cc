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


PATIENT = {"inactivity_s": 20.0, "status_timeout_s": 20.0, "request_timeout_s": 60.0}
"""A machine that is busy with other things is not what is tested here."""


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
        while True:
            try:
                async with asyncio.timeout(0.05):
                    await self.gate.acquire()
                break
            except TimeoutError:
                await call.heartbeat()
        await call.run_happily()


async def settled(router: RunningRouter, num: int) -> None:
    """So many wait."""
    await until(lambda: router.metric("baton_admission_queue_length") == num, 20.0)


CAPACITY = 1 + FEW
"""Of a fake that runs one sequence."""


async def full(
    router: RunningRouter, cluster: FakeCluster, key: str = "x"
) -> list[asyncio.Task[httpx.Response]]:
    """As many as the cluster takes, and one that waits: the last."""
    await until(lambda: router.router.workers.decodes[0].status.max_num_seqs == 1, 20.0)
    tasks = [asyncio.create_task(ask(router, key)) for _ in range(CAPACITY)]
    await until(lambda: cluster.relay.num_open_calls == CAPACITY, 20.0)
    tasks.append(asyncio.create_task(ask(router, key)))
    await settled(router, 1)
    return tasks


def came(cluster: FakeCluster) -> list[int]:
    """`max_tokens` of what came to the decode worker, by which tests tell requests apart."""
    return [request.sampling.max_tokens for request in cluster.decodes[0].requests]


async def test_one_greedy_tenant_waits_for_itself(
    start_router: StartRouter, answer: Sequence[int]
) -> None:
    async with (
        fake_cluster(answer) as cluster,
        start_router(cluster, api_keys=LINES, **PATIENT) as router,
    ):
        doors = Doors(cluster, 200)
        tasks = await full(router, cluster, GREEDY)
        tasks += [asyncio.create_task(ask(router, GREEDY)) for _ in range(39)]
        await settled(router, 40)
        tasks += [asyncio.create_task(ask(router, MODEST, max_tokens=49)) for _ in range(10)]
        await settled(router, 50)
        assert cluster.relay.num_open_calls == CAPACITY  # who waits holds nothing
        for _ in tasks:
            doors.gate.release()
        statuses = [response.status_code for response in await asyncio.gather(*tasks)]
        assert set(statuses) == {200}
        # What greedy took before it owes: first modest, then turn by turn.
        assert came(cluster)[CAPACITY : CAPACITY + 20].count(49) >= 9, came(cluster)
        assert router.metric("baton_admission_wait_seconds_count") == len(tasks)
        told = {"tenant": "modest", "kind": "output"}
        assert router.metric("baton_tenant_tokens_total", **told) == 10 * len(answer)


async def test_priorities_of_tenants_and_of_requests(
    start_router: StartRouter, answer: Sequence[int]
) -> None:
    async with (
        fake_cluster(answer) as cluster,
        start_router(cluster, api_keys=LINES, **PATIENT) as router,
    ):
        doors = Doors(cluster, 200)
        tasks = await full(router, cluster, MODEST)
        for num, (key, priority) in enumerate(
            [(MODEST, 1), (MODEST, 0), (MODEST, -1), (URGENT, 9)]
        ):
            body = {"priority": priority, "max_tokens": 40 + num}
            tasks.append(asyncio.create_task(ask(router, key, **body)))
            await settled(router, num + 2)
        for _ in tasks:
            doors.gate.release()
        await asyncio.gather(*tasks)
        # `full` left one of modest's, of no priority, that came before all others.
        assert came(cluster)[CAPACITY:] == [43, 42, 50, 41, 40]


async def test_it_waits_so_long_and_no_longer(
    start_router: StartRouter, answer: Sequence[int]
) -> None:
    async with (
        fake_cluster(answer) as cluster,
        start_router(cluster, queue_wait_s=0.3, **PATIENT) as router,
    ):
        doors = Doors(cluster, 100)
        tasks = await full(router, cluster)
        refused = await ask(router)
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["type"] == "rate_limit_error"
        reason = {"reason": "queue_deadline"}
        await until(lambda: router.metric("baton_admission_rejections_total", **reason) == 2, 20.0)
        for _ in tasks:
            doors.gate.release()
        statuses = [(await task).status_code for task in tasks]
        assert Counter(statuses) == {200: CAPACITY, 429: 1}
        assert (await ask(router)).status_code == 200


async def test_a_flood_drowns_itself_only(start_router: StartRouter, answer: Sequence[int]) -> None:
    async with (
        fake_cluster(answer) as cluster,
        start_router(cluster, api_keys=LINES, max_queue=5, **PATIENT) as router,
    ):
        doors = Doors(cluster, 200)
        greedy = await full(router, cluster, GREEDY)
        greedy += [asyncio.create_task(ask(router, GREEDY)) for _ in range(20)]
        full_queue = {"reason": "queue_full"}
        await until(
            lambda: router.metric("baton_admission_rejections_total", **full_queue) == 16, 20.0
        )
        modest = [asyncio.create_task(ask(router, MODEST)) for _ in range(2)]
        await until(
            lambda: router.metric("baton_admission_rejections_total", **full_queue) == 18, 20.0
        )
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
        start_router(cluster, **PATIENT) as router,
    ):
        doors = Doors(cluster, 100)
        tasks = await full(router, cluster)
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


async def test_the_wait_is_told_and_explained(
    start_router: StartRouter, answer: Sequence[int]
) -> None:
    async with (
        fake_cluster(answer) as cluster,
        start_router(cluster, **PATIENT) as router,
    ):
        doors = Doors(cluster, 100)
        tasks = await full(router, cluster)
        told = (await router.http.get("/v1/cluster")).json()["cluster"]
        assert (told["num_in_line"], told["num_prompts"]) == (1, CAPACITY + 1)
        await asyncio.sleep(0.2)
        for _ in tasks:
            doors.gate.release()
        last = (await asyncio.gather(*tasks))[-1]
        request_id = last.headers["x-baton-request-id"]
        told = (await router.http.get(f"/v1/requests/{request_id}")).json()
        assert told["parts_ms"]["line"] >= 150
        assert told["prompts"][0]["waits"]
