"""What the router's metrics mean."""

import asyncio
from collections.abc import Sequence

from tests.router.conftest import StartRouter
from tests.router.fake_workers import fake_cluster


async def test_time_to_first_token_holds_all_that_the_client_waited_for(
    start_router: StartRouter, answer: Sequence[int]
) -> None:
    """Also the wait for a worker, before there is a prompt to dispatch."""
    async with fake_cluster(answer) as cluster:
        for worker in cluster.workers:
            await worker.kill()
        async with start_router(cluster, ready_wait_s=5) as router:
            asked = asyncio.create_task(router.complete())
            await asyncio.sleep(0.3)
            for worker in cluster.workers:
                await worker.start()
            assert (await asked).status_code == 200
            assert router.metric("baton_time_to_first_token_seconds_sum") > 0.3
