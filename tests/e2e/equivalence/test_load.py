"""Load: many mixed requests through two prefill and two decode workers, with the real model, in
blocks of two sizes. All are answered, and rightly; none is lost; the pools are empty after."""

import asyncio
import random

import httpx
import pytest

from tests.e2e.cluster import MODEL_NAME, RouterProcess, WorkerProcess
from tests.e2e.equivalence.relay import Relay

NUM_REQUESTS = 200
CONCURRENCY = 32


def mixed_bodies(seed: int) -> list[dict[str, object]]:
    """Short and long prompts, greedy and sampled, streamed and not; each kind several times, so
    that equal requests can be compared."""
    draw = random.Random(seed)
    kinds: list[dict[str, object]] = []
    for kind in range(NUM_REQUESTS // 4):
        length = draw.choice((1, 3, 17, 40, 90, 150, 400))
        kinds.append(
            {
                "model": MODEL_NAME,
                "prompt": [draw.randrange(17, 49152) for _ in range(length)],
                "max_tokens": draw.choice((1, 2, 5, 12)),
                "temperature": draw.choice((0, 0.9)),
                "seed": kind,
                "ignore_eos": True,
                "stream": False,
            }
        )
    # Copies share no cached KV, so that each takes the whole relay and decode computes no prompt.
    bodies = [
        kind | {"stream": copy % 2 == 1, "cache_salt": f"copy {copy}"}
        for kind in kinds
        for copy in range(4)
    ]
    draw.shuffle(bodies)
    return bodies


async def text_of(client: httpx.AsyncClient, body: dict[str, object]) -> str:
    response = await client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    if not body["stream"]:
        answer = response.json()
        assert answer["usage"]["completion_tokens"] == body["max_tokens"]
        text: str = answer["choices"][0]["text"]
        return text
    lines = [line for line in response.text.splitlines() if line]
    assert lines[-1] == "data: [DONE]"
    chunks = [httpx.Response(200, content=line[6:]).json() for line in lines[:-1]]
    assert [c["choices"][0]["finish_reason"] for c in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    return "".join(chunk["choices"][0]["text"] for chunk in chunks)


@pytest.mark.parametrize("relay", ["smollm2"], indirect=True)
async def test_load(relay: Relay, router: RouterProcess) -> None:
    bodies = mixed_bodies(seed=5)
    limit = asyncio.Semaphore(CONCURRENCY)
    timeout = httpx.Timeout(170)
    decodes = [worker for worker in relay.cluster.workers if worker.role == "decode"]
    before = [prompt_tokens(worker) for worker in decodes]
    async with httpx.AsyncClient(base_url=router.url, timeout=timeout) as client:

        async def ask(body: dict[str, object]) -> str:
            async with limit:
                return await text_of(client, body)

        texts = await asyncio.gather(*(ask(body) for body in bodies))
    by_kind: dict[object, set[str]] = {}
    for body, text in zip(bodies, texts, strict=True):
        by_kind.setdefault(body["seed"], set()).add(text)
    different = {seed: answers for seed, answers in by_kind.items() if len(answers) > 1}
    assert not different, "equal requests, whoever served them, have equal answers"

    metrics = router.metrics()
    assert metrics.value("baton_requests_total", outcome="completed") == NUM_REQUESTS
    assert metrics.value("baton_requests_in_flight") == 0
    for worker, (computed, received) in zip(decodes, before, strict=True):
        assert prompt_tokens(worker)[0] == computed
        assert prompt_tokens(worker)[1] > received
    await asyncio.to_thread(relay.cluster.assert_all_back)


def prompt_tokens(worker: WorkerProcess) -> tuple[float, float]:
    """(computed, received)"""
    metrics, name = worker.metrics(), "baton_prompt_tokens_total"
    return metrics.value(name, source="computed"), metrics.value(name, source="received")
