"""Load: many mixed requests through two prefill and two decode workers, with the real model. All
are answered, and rightly; none is lost; the pools are empty after."""

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.e2e.cluster import MODEL_NAME, Cluster

NUM_REQUESTS = 200
CONCURRENCY = 32


@pytest.fixture(scope="module")
def cluster(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = Cluster(
        tmp_path_factory.mktemp("load"),
        smollm2,
        dtype="float32",
        num_blocks=300,
        max_model_len=1024,
    )
    try:
        for index, role in enumerate(("prefill", "decode", "prefill", "decode")):
            cluster.worker(role, cores=index % 2)
        cluster.router()
        cluster.wait_ready()
        yield cluster
    finally:
        cluster.close()


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


async def test_load(cluster: Cluster) -> None:
    bodies = mixed_bodies(seed=5)
    limit = asyncio.Semaphore(CONCURRENCY)
    timeout = httpx.Timeout(170)
    async with httpx.AsyncClient(base_url=cluster.routers[0].url, timeout=timeout) as client:

        async def ask(body: dict[str, object]) -> str:
            async with limit:
                return await text_of(client, body)

        texts = await asyncio.gather(*(ask(body) for body in bodies))
    by_kind: dict[object, set[str]] = {}
    for body, text in zip(bodies, texts, strict=True):
        by_kind.setdefault(body["seed"], set()).add(text)
    different = {seed: answers for seed, answers in by_kind.items() if len(answers) > 1}
    assert not different, "equal requests, whoever served them, have equal answers"

    router = cluster.routers[0].metrics()
    assert router.value("baton_requests_total", outcome="completed") == NUM_REQUESTS
    assert router.value("baton_requests_in_flight") == 0
    workers = [worker.metrics() for worker in cluster.workers if worker.role == "decode"]
    assert all(w.value("baton_prompt_tokens_total", source="computed") == 0 for w in workers)
    assert all(w.value("baton_prompt_tokens_total", source="received") > 0 for w in workers)
    await asyncio.to_thread(cluster.assert_all_back)
