"""A viewer of the cluster that stands still; test_cluster.py has the feed over HTTP."""

import asyncio

import pytest
from starlette.types import Message

from router.cluster_feed import ClusterFeed, FeedResponse
from tests.router.fake_workers import until


@pytest.mark.parametrize("stuck_at", ["the start", "the end"])
async def test_who_takes_no_start_or_no_end_is_left(stuck_at: str) -> None:
    async def send(message: Message) -> None:
        is_end = message.get("more_body") is False
        if is_end if stuck_at == "the end" else message["type"] == "http.response.start":
            await asyncio.Event().wait()

    async def receive() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    feed = ClusterFeed({"cluster": lambda: "{}"}, max_viewers=1)
    viewing = asyncio.create_task(FeedResponse(feed, send_timeout_s=0.05)({}, receive, send))
    await until(lambda: feed.num_viewers == 1)
    feed.close()
    async with asyncio.timeout(5):
        await viewing
    assert feed.num_viewers == 0
