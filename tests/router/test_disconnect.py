"""A client that leaves, at any moment, takes all its work with it."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import httpx
import pytest

from tests.router.conftest import RunningRouter, StartRouter
from tests.router.fake_relay import Relay
from tests.router.fake_workers import (
    GenerateCall,
    PrefillCall,
    fake_cluster,
    until,
)


@asynccontextmanager
async def raw_post(router: RunningRouter, **body: object) -> AsyncIterator[asyncio.StreamReader]:
    """A POST on a socket of its own, which is cut off at the end of the block."""
    content = json.dumps({"model": "tiny", "prompt": "Hi", "max_tokens": 50, **body}).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: router\r\nContent-Length: {len(content)}\r\n"
        "Content-Type: application/json\r\n\r\n"
    )
    url = httpx.URL(router.url)
    reader, writer = await asyncio.open_connection(url.host, url.port)
    writer.write(head.encode() + content)
    try:
        yield reader
    finally:
        writer.transport.abort()


async def reserve_and_hang(call: GenerateCall) -> None:
    await call.reserve()
    await call.hang()


async def some_tokens_and_hang(call: GenerateCall) -> None:
    await call.relay.commit(await call.reserve())
    await call.tokens(0, call.relay.answer[:3])
    await call.hang()


async def token_0_and_hang(call: PrefillCall) -> None:
    await call.first_token()
    await call.hang()


async def all_ended(router: RunningRouter, relay: Relay) -> None:
    """Well before any deadline could have done it."""
    await until(lambda: relay.num_open_calls == 0, timeout_s=0.3)
    await until(lambda: router.metric("baton_requests_total", outcome="cancelled") == 1)


@pytest.mark.parametrize("stream", [False, True])
async def test_before_token_0(
    start_router: StartRouter, answer: Sequence[int], stream: bool
) -> None:
    async with (
        fake_cluster(answer) as cluster,
        start_router(cluster, inactivity_s=5.0) as router,
    ):
        cluster.decodes[0].scripts.append(reserve_and_hang)
        cluster.prefills[0].scripts.append(PrefillCall.hang)
        async with raw_post(router, stream=stream):
            await until(lambda: cluster.relay.num_open_calls == 2)
        await all_ended(router, cluster.relay)


@pytest.mark.parametrize("stream", [False, True])
async def test_in_the_middle_of_the_transfer(
    start_router: StartRouter, answer: Sequence[int], stream: bool
) -> None:
    async with (
        fake_cluster(answer) as cluster,
        start_router(cluster, inactivity_s=5.0) as router,
    ):
        cluster.decodes[0].scripts.append(reserve_and_hang)
        cluster.prefills[0].scripts.append(token_0_and_hang)
        async with raw_post(router, stream=stream) as reader:
            if stream:
                assert b"200" in await reader.readuntil(b"data: ")
            await until(lambda: router.metric("baton_request_output_tokens_total") == 1)
        await all_ended(router, cluster.relay)


@pytest.mark.parametrize("stream", [False, True])
async def test_while_tokens_come(
    start_router: StartRouter, answer: Sequence[int], stream: bool
) -> None:
    async with (
        fake_cluster(answer) as cluster,
        start_router(cluster, inactivity_s=5.0) as router,
    ):
        cluster.decodes[0].scripts.append(some_tokens_and_hang)
        async with raw_post(router, stream=stream):
            await until(lambda: router.metric("baton_request_output_tokens_total") == 3)
        await all_ended(router, cluster.relay)


async def test_while_it_waits_for_a_worker(start_router: StartRouter) -> None:
    async with fake_cluster(()) as cluster:
        for worker in cluster.workers:
            await worker.kill()
        async with start_router(cluster, ready_wait_s=5.0) as router:
            async with raw_post(router):
                await until(lambda: router.metric("baton_requests_in_flight") == 1)
            await all_ended(router, cluster.relay)


async def test_with_many_prompts(start_router: StartRouter, answer: Sequence[int]) -> None:
    async with (
        fake_cluster(answer, num_prefills=2, num_decodes=2) as cluster,
        start_router(cluster, inactivity_s=5.0) as router,
    ):
        for worker in cluster.decodes:
            worker.scripts.extend([some_tokens_and_hang] * 4)
        async with raw_post(router, prompt=["a"] * 8, stream=True):
            await until(lambda: router.metric("baton_request_output_tokens_total") == 24)
        await all_ended(router, cluster.relay)
