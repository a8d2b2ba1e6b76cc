"""The short way of a streamed body: written like the long one, and no way past a slow client."""

import asyncio
import json
from collections.abc import Sequence

import httpx
import pytest

from tests.router.conftest import ANSWER, RunningRouter, StartRouter
from tests.router.fake_workers import GenerateCall, fake_cluster, until


def request(version: str, **fields: object) -> bytes:
    body = json.dumps({"model": "tiny", "prompt": "Hi", "stream": True, **fields}).encode()
    head = f"POST /v1/completions HTTP/{version}\r\nHost: r\r\nConnection: close\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


async def connect(
    router: RunningRouter, limit: int = 1 << 16
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    url = httpx.URL(router.url)
    return await asyncio.open_connection(url.host, url.port, limit=limit)


def texts(events: bytes) -> list[str]:
    *chunks, done = events.decode().removesuffix("\n\n").split("\n\n")
    assert done == "data: [DONE]"
    return [json.loads(chunk.removeprefix("data: "))["choices"][0]["text"] for chunk in chunks]


def unchunked(body: bytes) -> bytes:
    whole = b""
    while True:
        size, _, body = body.partition(b"\r\n")
        if not int(size, 16):
            assert body == b"\r\n"
            return whole
        whole += body[: int(size, 16)]
        assert body[int(size, 16) :][:2] == b"\r\n"
        body = body[int(size, 16) + 2 :]


@pytest.mark.parametrize("version", ["1.0", "1.1"])
async def test_chunks_are_for_clients_that_know_them(
    start_router: StartRouter, answer: Sequence[int], version: str
) -> None:
    async with fake_cluster(answer) as cluster, start_router(cluster) as router:
        reader, writer = await connect(router)
        writer.write(request(version, max_tokens=50))
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        writer.close()
        has_chunks = b"transfer-encoding: chunked" in head.lower()
        assert has_chunks == (version == "1.1")
        assert "".join(texts(unchunked(body) if has_chunks else body)) == ANSWER


async def test_a_client_that_reads_nothing_is_left(
    start_router: StartRouter, answer: Sequence[int]
) -> None:
    """Once the buffers between are full, the short way is closed and the long one has its time."""

    async def endless(call: GenerateCall) -> None:
        await call.relay.commit(await call.reserve())
        for index in range(1 << 20):
            await call.tokens(1000 * index, [answer[0]] * 1000)

    async with (
        fake_cluster(answer) as cluster,
        start_router(cluster, send_timeout_s=0.2, request_timeout_s=60.0) as router,
    ):
        for worker in cluster.workers:
            worker.status.max_model_len = 1 << 31
        await until(lambda: router.router.workers.max_model_len == 1 << 31)
        cluster.decodes[0].scripts.append(endless)
        _, writer = await connect(router, limit=1 << 10)
        writer.write(request("1.1", max_tokens=1 << 30))
        await until(
            lambda: router.metric("baton_requests_total", outcome="cancelled") == 1, timeout_s=30
        )
        await until(lambda: not router.server.server_state.connections)
        writer.transport.abort()
