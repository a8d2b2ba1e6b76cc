"""Faults of processes and clients: each costs time, and neither the answer nor a block, slot, task
or connection. Real processes, a tiny model in float32, so that answers compare exactly.

The prompt takes dozens of chunks, and the answer dozens of steps, so that there is a middle to
break things in.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import httpx
import pytest

from protos import serving_pb2 as pb
from protos import serving_pb2_grpc as pb_grpc
from tests.e2e.cluster import MODEL_NAME, Cluster, RouterProcess, WorkerProcess
from tests.e2e.tokens import TokenClient, token_client

NUM_PROMPT = 1200
NUM_OUTPUTS = 120
INACTIVITY_S = 2.5
POOL_BLOCKS = 200
CHUNK = 4
"""Tokens of a prefill step: so few that a prompt takes hundreds of steps."""


@pytest.fixture(scope="module")
def running(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = Cluster(
        tmp_path_factory.mktemp("faults"),
        tiny_llama,
        dtype="float32",
        num_blocks=POOL_BLOCKS,
        max_model_len=1600,
        transfer_timeout_s=3,
    )
    try:
        for index, role in enumerate(("prefill", "decode", "prefill", "decode")):
            cluster.worker(role, cores=index % 2, token_budget=CHUNK if role == "prefill" else 512)
        cluster.router(inactivity_s=INACTIVITY_S, status_interval_s=0.1)
        cluster.wait_ready()
        yield cluster
    finally:
        cluster.close()


@pytest.fixture
def cluster(running: Cluster) -> Iterator[Cluster]:
    """All workers alive before, and nothing held after."""
    yield running
    for worker in running.workers:
        if not worker.is_running:
            worker.start_again()
            worker.wait_ready()
    running.assert_all_back()


def of_role(cluster: Cluster, role: str) -> list[WorkerProcess]:
    return [worker for worker in cluster.workers if worker.role == role]


def is_prefilling(worker: WorkerProcess) -> bool:
    return worker.is_running and worker.status().num_running > 0


def is_receiving(worker: WorkerProcess) -> bool:
    """Its blocks are claimed, so frames have come; and it waits for more."""
    status = worker.status()
    return status.num_awaiting_kv > 0 and status.blocks.held > 0


def is_decoding(worker: WorkerProcess) -> bool:
    return worker.status().num_running > 0


async def first(
    workers: list[WorkerProcess], condition: Callable[[WorkerProcess], bool]
) -> WorkerProcess:
    """The worker that first meets the condition."""
    async with asyncio.timeout(20):
        while True:
            for worker in workers:
                if await asyncio.to_thread(condition, worker):
                    return worker


def prompt_of(seed: int, length: int = NUM_PROMPT) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(17, 49152) for _ in range(length)]


async def undisturbed(cluster: Cluster, prompt: list[int], num_outputs: int) -> list[int]:
    """The answer of one engine."""
    async with token_client([], of_role(cluster, "decode"), mode="colocated") as client:
        return await client.generate(prompt, num_outputs)


@asynccontextmanager
async def relay_client(cluster: Cluster) -> AsyncIterator[TokenClient]:
    async with token_client(
        of_role(cluster, "prefill"), of_role(cluster, "decode"), inactivity_s=INACTIVITY_S
    ) as client:
        yield client


def computed_prompt_tokens(cluster: Cluster) -> float:
    return sum(
        worker.metrics().value("baton_prompt_tokens_total", source="computed")
        for worker in of_role(cluster, "decode")
        if worker.is_running
    )


def lost_transfers(cluster: Cluster) -> float:
    """Of peers that died, as the decode workers count them."""
    return sum(
        worker.metrics().value("baton_transfers_lost_total", error="PeerLost")
        for worker in of_role(cluster, "decode")
    )


async def test_prefill_killed_in_mid_transfer(cluster: Cluster) -> None:
    prompt = prompt_of(1)
    expected = await undisturbed(cluster, prompt, 20)
    before, lost_before = computed_prompt_tokens(cluster), lost_transfers(cluster)
    async with relay_client(cluster) as client:
        answer = asyncio.create_task(client.generate(prompt, 20))
        await first(of_role(cluster, "decode"), is_receiving)
        victim = await first(of_role(cluster, "prefill"), is_prefilling)
        victim.kill()
        assert await answer == expected
        assert client.retries("decode") == 0, "the stream and the installed prefix are kept"
    assert lost_transfers(cluster) == lost_before + 1, "decode saw its peer die"
    assert computed_prompt_tokens(cluster) == before, "the other prefill worker computed it"


async def test_decode_killed_in_mid_stream(cluster: Cluster) -> None:
    prompt = prompt_of(2, 100)
    expected = await undisturbed(cluster, prompt, NUM_OUTPUTS)
    async with relay_client(cluster) as client:
        answer = asyncio.create_task(client.generate(prompt, NUM_OUTPUTS))
        victim = await first(of_role(cluster, "decode"), is_decoding)
        victim.kill()
        assert await answer == expected
        assert client.retries("decode") == 1


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_worker_killed_before_it_is_used(cluster: Cluster, role: str) -> None:
    prompt = prompt_of(3, 60)
    expected = await undisturbed(cluster, prompt, 10)
    async with relay_client(cluster) as client:
        of_role(cluster, role)[0].kill()
        answers = await asyncio.gather(*(client.generate(prompt, 10) for _ in range(4)))
    assert answers == [expected] * 4


async def test_all_prefill_workers_killed(cluster: Cluster) -> None:
    """Decode computes the prompt itself, and counts it with its reason."""
    prompt = prompt_of(4, 200)
    expected = await undisturbed(cluster, prompt, 10)
    async with relay_client(cluster) as client:
        for worker in of_role(cluster, "prefill"):
            worker.kill()
        assert await client.generate(prompt, 10) == expected
    counts = [
        worker.metrics().value("baton_local_prefills_total", reason="no_prefill_worker")
        for worker in of_role(cluster, "decode")
    ]
    assert sum(counts) == 1


async def test_prefill_frozen_for_longer_than_the_deadline(cluster: Cluster) -> None:
    prompt = prompt_of(5)
    expected = await undisturbed(cluster, prompt, 20)
    async with relay_client(cluster) as client:
        answer = asyncio.create_task(client.generate(prompt, 20))
        await first(of_role(cluster, "decode"), is_receiving)
        victim = await first(of_role(cluster, "prefill"), is_prefilling)
        victim.freeze()
        try:
            assert await answer == expected
            assert client.retries("prefill") == 1
        finally:
            victim.thaw()


async def test_decode_frozen_for_longer_than_the_deadline(cluster: Cluster) -> None:
    prompt = prompt_of(6, 100)
    expected = await undisturbed(cluster, prompt, NUM_OUTPUTS)
    async with relay_client(cluster) as client:
        answer = asyncio.create_task(client.generate(prompt, NUM_OUTPUTS))
        victim = await first(of_role(cluster, "decode"), is_decoding)
        victim.freeze()
        try:
            assert await answer == expected
            assert client.retries("decode") == 1
        finally:
            victim.thaw()


DISCONNECTS: dict[str, tuple[str, Callable[[WorkerProcess], bool]]] = {
    "before token 0": ("prefill", is_prefilling),
    "in mid transfer": ("decode", is_receiving),
    "in mid decode": ("decode", is_decoding),
}


@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize("moment", DISCONNECTS)
async def test_client_disconnects(cluster: Cluster, moment: str, streaming: bool) -> None:
    """Within two seconds nothing is held for it any more, anywhere."""
    role, condition = DISCONNECTS[moment]
    body = {
        "model": MODEL_NAME,
        "prompt": prompt_of(7),
        "max_tokens": 300,
        "temperature": 0,
        "ignore_eos": True,
        "stream": streaming,
    }
    async with httpx.AsyncClient(base_url=cluster.routers[0].url, timeout=60) as client:

        async def ask() -> None:
            async with client.stream("POST", "/v1/completions", json=body) as response:
                await response.aread()

        request = asyncio.create_task(ask())
        await first(of_role(cluster, role), condition)
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request
    await asyncio.to_thread(cluster.assert_all_back)
    assert router_in_flight(cluster.routers[0]) == 0


def router_in_flight(router: RouterProcess) -> float:
    return router.metrics().value("baton_requests_in_flight")


def sampling(max_tokens: int) -> pb.Sampling:
    return pb.Sampling(max_tokens=max_tokens, top_p=1, ignore_eos=True)


@asynccontextmanager
async def reserved_stream(
    cluster: Cluster, prompt: list[int]
) -> AsyncIterator[
    tuple[pb.KVTicket, "grpc.aio.UnaryStreamCall[pb.GenerateRequest, pb.GenerateEvent]"]
]:
    """A Generate stream by hand, up to its ticket."""
    decode = of_role(cluster, "decode")[0]
    async with grpc.aio.insecure_channel(decode.grpc_address) as channel:
        request = pb.GenerateRequest(
            request_id="by-hand",
            prompt_token_ids=prompt,
            sampling=sampling(5),
            samples=[pb.Sample()],
        )
        call = pb_grpc.DecodeStub(channel).Generate(request, timeout=30)
        async for event in call:
            if event.HasField("reserved"):
                yield event.reserved, call
                break
        call.cancel()


async def prefill_by_hand(
    worker: WorkerProcess, prompt: list[int], ticket: pb.KVTicket
) -> list[pb.PrefillEvent]:
    async with grpc.aio.insecure_channel(worker.grpc_address) as channel:
        request = pb.PrefillRequest(
            request_id="by-hand",
            prompt_token_ids=prompt,
            sampling=sampling(5),
            samples=[pb.Sample()],
            ticket=ticket,
        )
        return [event async for event in pb_grpc.PrefillStub(channel).Prefill(request, timeout=30)]


async def test_ticket_used_twice(cluster: Cluster) -> None:
    """By two workers at once and again afterwards: one transfer, one answer, the others aborted."""
    prompt = prompt_of(8)
    prefills = of_role(cluster, "prefill")
    async with reserved_stream(cluster, prompt) as (ticket, call):
        outcomes = await asyncio.gather(
            *(prefill_by_hand(worker, prompt, ticket) for worker in prefills),
            return_exceptions=True,
        )
        refused = [o for o in outcomes if isinstance(o, grpc.aio.AioRpcError)]
        assert [error.code() for error in refused] == [grpc.StatusCode.ABORTED]
        for worker in prefills:
            with pytest.raises(grpc.aio.AioRpcError, match="ABORTED"):
                await prefill_by_hand(worker, prompt, ticket)
        tokens: list[int] = []
        async for event in call:
            assert not event.HasField("reserved"), "the first transfer was not disturbed"
            tokens += event.tokens.token_ids
    assert tokens == await undisturbed(cluster, prompt, 5)


@pytest.mark.parametrize(
    ("field", "value"), [("fingerprint", bytes(32)), ("generation", 1)], ids=["model", "process"]
)
async def test_ticket_of_another_model_or_process(
    cluster: Cluster, field: str, value: object
) -> None:
    """Refused in the handshake, before any byte of KV; the prefill leg says so."""
    prompt = prompt_of(9, 50)
    async with reserved_stream(cluster, prompt) as (ticket, _):
        setattr(ticket, field, value)
        with pytest.raises(grpc.aio.AioRpcError, match="FAILED_PRECONDITION"):
            await prefill_by_hand(of_role(cluster, "prefill")[0], prompt, ticket)


async def test_prompt_that_no_pool_can_hold(cluster: Cluster) -> None:
    body = {"model": MODEL_NAME, "prompt": prompt_of(10, 1700), "max_tokens": 5}
    async with httpx.AsyncClient(base_url=cluster.routers[0].url, timeout=10) as client:
        response = await client.post("/v1/completions", json=body)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert "1700" in error["message"]
    assert "1600" in error["message"]


async def test_pools_momentarily_full(cluster: Cluster) -> None:
    """Three times what both pools hold: requests wait for room, and none is refused or lost."""
    prompts = [prompt_of(20 + index, 700) for index in range(12)]  # 44 of 200 blocks each
    expected = [await undisturbed(cluster, prompt, 8) for prompt in prompts]
    async with relay_client(cluster) as client:
        answers = await asyncio.gather(*(client.generate(prompt, 8) for prompt in prompts))
    assert answers == expected
