"""Faults of processes and clients: each costs time, and neither the answer nor a block, slot, task
or connection.
"""

import asyncio
import random
from collections.abc import Callable

import httpx
import pytest

from deploy.admin import Admin
from tests.e2e.answers import KINDS, Answer, ask
from tests.e2e.chaos import Chaos, storm
from tests.e2e.cluster import MODEL_NAME, Cluster, RouterProcess, WorkerProcess
from tests.e2e.slow_relay import (
    ADMIN_TOKEN,
    NUM_OUTPUTS,
    first,
    is_decoding,
    is_prefilling,
    is_receiving,
    of_role,
    prompt_of,
    relay_client,
    undisturbed,
)
from tests.router.fake_workers import until


def computed_prompt_tokens(cluster: Cluster) -> float:
    return sum(
        worker.metrics().value("baton_prompt_tokens_total", source="computed")
        for worker in of_role(cluster, "decode")
        if worker.is_running
    )


def lost_transfers(cluster: Cluster) -> float:
    """As the decode workers count them: by the broken connection, or by the router's word, if that
    comes first."""
    return sum(
        worker.metrics().value("baton_transfers_lost_total", error=error)
        for worker in of_role(cluster, "decode")
        for error in ("PeerLost", "TransferAborted")
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
    assert lost_transfers(cluster) == lost_before + 1, "one transfer, and it is known"
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


async def test_decode_killed_with_three_samples_under_way(cluster: Cluster) -> None:
    """Each goes on where it was."""
    prompt, hot = prompt_of(9, 100), {"temperature": 1.0, "seed": 3}
    async with relay_client(cluster) as client:
        expected = await client.samples(prompt, NUM_OUTPUTS, 3, cache_salt="undisturbed", **hot)
        answer = asyncio.create_task(client.samples(prompt, NUM_OUTPUTS, 3, **hot))
        victim = await first(of_role(cluster, "decode"), is_decoding)
        victim.kill()
        assert await answer == expected
        assert client.retries("decode") == 1
    assert len(set(map(tuple, expected))) == 3


def num_running(worker: WorkerProcess) -> float:
    return worker.metrics().value("vllm:num_requests_running")


async def test_decode_killed_under_requests_of_every_kind(cluster: Cluster) -> None:
    """Each client sees one unbroken answer: the undisturbed one, and its tokens counted once."""
    router = cluster.routers[0]
    await asyncio.to_thread(router.wait_knows_all)
    async with httpx.AsyncClient(base_url=router.url, timeout=60) as client:

        async def all_kinds(answers: dict[str, Answer], num_tokens: int) -> None:
            calls = (
                ask(client, kind, f"Tell me of {name}.", num_tokens, answers[name])
                for name, kind in KINDS.items()
            )
            await asyncio.gather(*calls)

        expected, answers = ({name: Answer() for name in KINDS} for _ in range(2))
        await all_kinds(expected, NUM_OUTPUTS)
        asked = asyncio.create_task(all_kinds(answers, NUM_OUTPUTS))
        streams = [answers[name] for name, kind in KINDS.items() if kind.is_streaming]
        await until(lambda: all(one.num_events > 5 for one in streams), 20)
        assert not any(one.is_done for one in streams)
        max(of_role(cluster, "decode"), key=num_running).kill()
        await asked
    assert router.metrics().value("baton_retries_total", leg="decode", reason="unavailable") >= 3
    for name, answer in answers.items():
        assert answer.told() == expected[name].told(), name
        assert answer.logprobs() == pytest.approx(expected[name].logprobs(), abs=1e-4), name
    assert all(answer.status == 200 and answer.usage for answer in answers.values())


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


async def test_router_vanishes_without_a_word(cluster: Cluster) -> None:
    """No FIN, no reset, and everybody else is frozen too: decode itself notices that the lease's
    holder answers no ping (5 s and 5 s), and gives the promised room back."""
    router, prefills = cluster.routers[0], of_role(cluster, "prefill")
    body = {"model": MODEL_NAME, "prompt": prompt_of(11), "max_tokens": 5}
    for worker in prefills:
        worker.freeze()
    async with httpx.AsyncClient(base_url=router.url, timeout=60) as client:
        request = asyncio.create_task(client.post("/v1/completions", json=body))
        decode = await first(of_role(cluster, "decode"), has_promised)
        router.freeze()
        try:
            await first([decode], lambda worker: not has_promised(worker), within_s=12)
        finally:
            router.thaw()
            for worker in prefills:
                worker.thaw()
            request.cancel()
            await asyncio.gather(request, return_exceptions=True)
    await asyncio.to_thread(router.wait_ready)


def has_promised(worker: WorkerProcess) -> bool:
    return worker.status().blocks.promised > 0


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


async def test_a_short_storm_breaks_no_stream(cluster: Cluster) -> None:
    """As tests/e2e/test_chaos.py, for half a minute."""
    with Admin(cluster.routers[0].admin_url, ADMIN_TOKEN) as admin:
        chaos = Chaos(
            *(cluster, admin, random.Random(11)), joins=False, pause_s=(0.3, 1.2), freeze_s=3.0
        )
        outcomes = await storm(cluster, admin, chaos, seconds=30.0, num_clients=4)
    assert not outcomes.wrong, "\n".join(outcomes.wrong[:5])
    assert len(chaos.happened) >= 4, chaos.happened
    assert sum(outcomes.answered.values()) >= 16
