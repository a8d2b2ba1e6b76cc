"""Strangers at the ports: junk on HTTP, gRPC and the fabric leaves every process alive, and the
next request right."""

import asyncio
import contextlib
import random
import re
import socket
from typing import Any

import aiohttp
import grpc
import httpx
import pytest

from protos import serving_pb2 as pb
from protos import serving_pb2_grpc as pb_grpc
from tests.e2e.cluster import MODEL_NAME, Cluster, RouterProcess, WorkerProcess

QUESTION = {
    "model": MODEL_NAME,
    "prompt": [5, 6, 7] * 40,
    "max_tokens": 6,
    "temperature": 0,
    "ignore_eos": True,
}


def answer(cluster: Cluster) -> str:
    response = httpx.post(f"{cluster.routers[0].url}/v1/completions", json=QUESTION, timeout=20)
    assert response.status_code == 200, response.text
    text: str = response.json()["choices"][0]["text"]
    return text


def port_of(address: str) -> int:
    return int(address.rpartition(":")[2])


def fabric_port(worker: WorkerProcess) -> int:
    match = re.search(r"fabric=ucx://[\d.]+:(\d+)", worker.log.read_text())
    assert match, "a worker logs its fabric's address"
    return int(match[1])


def ports(cluster: Cluster) -> dict[str, int]:
    prefill, decode = cluster.workers
    return {
        "http": port_of(cluster.routers[0].url),
        "prefill gRPC": port_of(prefill.grpc_address),
        "decode gRPC": port_of(decode.grpc_address),
        "prefill fabric": fabric_port(prefill),
        "decode fabric": fabric_port(decode),
    }


def pester(port: int, junk: bytes) -> None:
    """Connects, sends, and leaves without reading."""
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 2) as stranger:
        stranger.settimeout(2)
        stranger.sendall(junk)


@pytest.mark.parametrize(
    "where", ["http", "prefill gRPC", "decode gRPC", "prefill fabric", "decode fabric"]
)
def test_junk_bytes(cluster: Cluster, where: str) -> None:
    expected = answer(cluster)
    port = ports(cluster)[where]
    draw = random.Random(where)
    junk = [b"", b"\0", b"\xff" * 64, b"GET / HTTP/1.1\r\n\r\n", draw.randbytes(70_000)]
    junk += [b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + draw.randbytes(300), draw.randbytes(8)]
    for bytes_sent in junk * 3:
        pester(port, bytes_sent)
    half_open = [socket.create_connection(("127.0.0.1", port), 2) for _ in range(8)]
    assert answer(cluster) == expected
    for connection in half_open:
        connection.close()
    assert answer(cluster) == expected
    assert all(process.is_running for process in [*cluster.workers, *cluster.routers])
    cluster.assert_all_back()


HOSTILE_PROMPTS: list[object] = [
    [2**31],
    [-1],
    [49152],
    [1.5],
    [None],
    [[]],
    [],
    "",
    {},
    True,
    [[1, 2], "text"],
]


@pytest.mark.parametrize("prompt", HOSTILE_PROMPTS, ids=str)
def test_hostile_prompts_are_refused(cluster: Cluster, prompt: object) -> None:
    body = {**QUESTION, "prompt": prompt}
    response = httpx.post(f"{cluster.routers[0].url}/v1/completions", json=body, timeout=20)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "sampling",
    [
        pb.Sampling(max_tokens=0, top_p=1, repetition_penalty=1),
        pb.Sampling(max_tokens=4, top_p=0),
        pb.Sampling(max_tokens=4, top_p=float("nan")),
        pb.Sampling(max_tokens=4, top_p=1, repetition_penalty=1, temperature=-1),
        pb.Sampling(max_tokens=4, top_p=1, repetition_penalty=1, temperature=float("inf")),
    ],
    ids=str,
)
async def test_hostile_sampling_on_the_control_plane(
    cluster: Cluster, sampling: pb.Sampling
) -> None:
    """The workers do not trust the router either."""
    request = pb.GenerateRequest(
        request_id="x",
        prompt_token_ids=[1],
        sampling=sampling,
        samples=[pb.Sample()],
        local_prefill=True,
    )
    async with grpc.aio.insecure_channel(cluster.workers[1].grpc_address) as channel:
        with pytest.raises(grpc.aio.AioRpcError, match="INVALID_ARGUMENT"):
            async for _ in pb_grpc.DecodeStub(channel).Generate(request, timeout=10):
                pass


def shard(address: str, num_heads: int = 2) -> pb.KVShard:
    """The tiny model has two KV heads."""
    return pb.KVShard(address=address, generation=1, num_heads=num_heads)


@pytest.mark.parametrize(
    "change",
    [
        {"transfer_id": b"short"},
        {"num_tokens": 7},
        {"first_token": 3},
        {"block_size": 0},
        {"shards": [shard("nonsense")]},
        {"shards": [shard("ucx://127.0.0.1:1")]},
        {"shards": [shard("file:///etc/passwd")]},
        {"shards": []},
        {"shards": [shard("ucx://127.0.0.1:1", num_heads=1)]},
        {"shards": [shard("ucx://127.0.0.1:1"), shard("ucx://127.0.0.1:1")]},
    ],
    ids=str,
)
async def test_hostile_tickets(cluster: Cluster, change: dict[str, object]) -> None:
    """A clear status, soon, whatever the ticket says."""
    fingerprint = cluster.workers[1].status().fingerprint
    fields: dict[str, object] = {
        "transfer_id": bytes(16),
        "shards": [shard("ucx://127.0.0.1:9")],
        "fingerprint": fingerprint,
        "num_tokens": 3,
        "block_size": 16,
    }
    request = pb.PrefillRequest(
        request_id="x",
        prompt_token_ids=[1, 2, 3],
        sampling=pb.Sampling(max_tokens=4, top_p=1, repetition_penalty=1),
        samples=[pb.Sample()],
        ticket=pb.KVTicket(**{**fields, **change}),  # type: ignore[arg-type]
    )
    async with (
        asyncio.timeout(15),
        grpc.aio.insecure_channel(cluster.workers[0].grpc_address) as channel,
    ):
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            async for _ in pb_grpc.PrefillStub(channel).Prefill(request, timeout=12):
                pass
    assert refusal.value.code() in (
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.ABORTED,
        grpc.StatusCode.FAILED_PRECONDITION,
    ), refusal.value
    await asyncio.to_thread(cluster.assert_all_back)
    assert await asyncio.to_thread(answer, cluster)


WHO = ("name", "role", "ready")
ALL = (*WHO, "num_waiting", "num_running", "blocks", "num_transfers")


async def test_512_at_once_and_a_second_router_in_the_midst(cluster: Cluster) -> None:
    """Each is answered, or told when to come back; nothing is left, and both routers know the same
    of the workers."""
    first = cluster.routers[0]
    body = {**QUESTION, "prompt": [5, 6, 7] * 10, "max_tokens": 4}
    # A client whose own work does not grow with the square of its connections.
    connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(100)
    async with aiohttp.ClientSession(first.url, connector=connector, timeout=timeout) as client:

        async def ask() -> tuple[int, str, dict[str, Any]]:
            async with client.post("/v1/completions", json=body) as response:
                after = response.headers.get("retry-after", "")
                return response.status, after, await response.json()

        asked = [asyncio.create_task(ask()) for _ in range(512)]
        second = await asyncio.to_thread(cluster.router)
        await asyncio.to_thread(second.wait_ready)
        await asyncio.to_thread(second.wait_until, lambda: agree(first, second, WHO), "agreed")
        answers = await asyncio.gather(*asked)
    assert {status for status, _, _ in answers} <= {200, 429}
    assert all(int(after) >= 1 for status, after, _ in answers if status == 429)
    texts = {told["choices"][0]["text"] for status, _, told in answers if status == 200}
    assert len(texts) == 1
    await asyncio.to_thread(cluster.assert_all_back)
    metrics = first.metrics()
    for gauge in ("baton_requests_in_flight", "baton_admission_queue_length"):
        assert metrics.value(gauge) == 0
    await asyncio.to_thread(second.wait_until, lambda: agree(first, second, ALL), "agreed on load")


def agree(first: RouterProcess, second: RouterProcess, facts: tuple[str, ...]) -> bool:
    """On these of all workers."""

    def told(router: RouterProcess) -> list[list[object]]:
        view = httpx.get(f"{router.url}/v1/cluster", timeout=10).json()
        return sorted([worker[fact] for fact in facts] for worker in view["cluster"]["workers"])

    return told(first) == told(second)
