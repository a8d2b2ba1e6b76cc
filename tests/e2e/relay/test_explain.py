"""What the router says of a request is what happened to it: times, bytes, workers, faults; and what
the ledger says is held for whom is held for them, and for nobody else.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from playwright.async_api import expect

from engine.config import ModelConfig
from tests.browser import bars, chromium, live, page_at
from tests.e2e.cluster import MODEL_NAME, Cluster, RouterProcess, WorkerProcess
from tests.e2e.slow_relay import (
    CHUNK,
    INACTIVITY_S,
    first,
    is_prefilling,
    is_receiving,
    of_role,
    prompt_of,
)
from tests.router.chrome_trace import check_trace

HEADER = "x-baton-request-id"
UCX_TRANSPORTS = {"posix", "sysv", "cma", "xpmem", "tcp", "self", "rc_mlx5", "rc_verbs", "cuda_ipc"}
NUM_PROMPT = 300
NUM_OUTPUTS = 12


@pytest.fixture(scope="module")
def router(slow_relay: Cluster) -> Iterator[RouterProcess]:
    """A router of its own, that knows few requests and one decode worker."""
    workers = slow_relay.workers[:3]
    assert [worker.role for worker in workers] == ["prefill", "decode", "prefill"]
    router = slow_relay.router(
        workers, inactivity_s=INACTIVITY_S, status_interval_s=0.1, explain_requests=8
    )
    router.wait_ready()
    router.wait_knows_all()
    yield router
    router.ask_to_end()
    router.wait_end()


@pytest.fixture
async def client(cluster: Cluster, router: RouterProcess) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=router.url, timeout=60) as client:
        yield client


def body_of(seed: int, length: int = NUM_PROMPT, **more: object) -> dict[str, object]:
    return {
        "model": MODEL_NAME,
        "prompt": prompt_of(seed, length),
        "max_tokens": NUM_OUTPUTS,
        "temperature": 0,
        "ignore_eos": True,
        **more,
    }


async def explained(client: httpx.AsyncClient, request_id: str) -> dict[str, Any]:
    response = await client.get(f"/v1/requests/{request_id}")
    assert response.status_code == 200, response.text
    told: dict[str, Any] = response.json()
    return told


@pytest.mark.parametrize("stream", [True, False])
async def test_parts_add_up_to_what_was_measured(
    router: RouterProcess, client: httpx.AsyncClient, tiny_llama: Path, stream: bool
) -> None:
    before = router.metrics()
    began = asyncio.get_running_loop().time()
    response = await client.post("/v1/completions", json=body_of(1 + stream, stream=stream))
    seconds = asyncio.get_running_loop().time() - began
    told = await explained(client, response.headers[HEADER])
    after = router.metrics()

    total = sum(told["parts_ms"].values()) + told["residual_ms"]
    assert total == pytest.approx(told["total_ms"], abs=1e-6)
    assert total <= seconds * 1e3
    measured_s = grown(before, after, "baton_time_to_first_token_seconds_sum")
    tolerance_ms = 1 + told["clock_error_ms"]
    assert told["ttft_ms"] == pytest.approx(measured_s * 1e3, abs=tolerance_ms)
    if stream:  # the first byte goes out with the first token
        own = told["parts_ms"]["respond"]
        assert total - own == pytest.approx(measured_s * 1e3, abs=tolerance_ms)
    (prompt,) = told["prompts"]
    (attempt,) = prompt["attempts"]
    (prefill,) = attempt["prefills"]
    assert [stage["stage"] for stage in prefill["stages"]] == ["queue", "build", "pack", "ship"]
    stages = [stage["stage"] for stage in attempt["decode"]["stages"]]
    assert stages == ["queue", "install", "attach", "decode"]
    check_build(prefill, told, tolerance_ms)
    kv_nbytes = NUM_PROMPT * ModelConfig.from_folder(tiny_llama).kv_token_nbytes(torch.float32)
    sent, received = prefill["kv"], attempt["decode"]["kv"]
    assert sent["nbytes"] == received["nbytes"] == kv_nbytes
    assert sent["frames"] == received["frames"] > 0
    assert set(sent["transports"]) <= UCX_TRANSPORTS
    assert sent["transports"]
    assert (sent["codec"], prompt["samples"][0]["num_tokens"]) == ("raw", NUM_OUTPUTS)
    assert grown(before, after, "baton_handoff_exposed_seconds_count") == 1
    exposed_s = grown(before, after, "baton_handoff_exposed_seconds_sum")
    assert prompt["exposed_handoff_ms"] == pytest.approx(exposed_s * 1e3, abs=1e-6)
    response = await client.get(f"/v1/requests/{told['id']}?format=perfetto")
    named = {event["cat"] for event in check_trace(response.json())}
    assert {"build", "pack", "ship", "install", "attach", "decode", "validate"} <= named


def check_build(prefill: dict[str, Any], told: dict[str, Any], tolerance_ms: float) -> None:
    """The chunks are the build's, and the part has nearly all of it."""
    build, chunks = prefill["stages"][1], prefill["chunks"]
    assert [chunk["num_computed_tokens"] for chunk in chunks][:2] == [CHUNK, 2 * CHUNK]
    assert chunks[-1]["num_computed_tokens"] == NUM_PROMPT
    assert chunks[0]["begin_ms"] == pytest.approx(build["begin_ms"], abs=1e-3)
    assert chunks[-1]["end_ms"] == pytest.approx(build["end_ms"], abs=1e-3)
    assert told["parts_ms"]["prefill_build"] == pytest.approx(build["busy_ms"], abs=tolerance_ms)


def grown(before: Any, after: Any, name: str) -> float:
    return float(after.value(name) - before.value(name))


async def test_a_killed_prefill_worker_is_told(
    cluster: Cluster, router: RouterProcess, client: httpx.AsyncClient
) -> None:
    asked = asyncio.create_task(client.post("/v1/completions", json=body_of(5, 1200)))
    await first(of_role(cluster, "decode"), is_receiving)
    victim = await first(of_role(cluster, "prefill"), is_prefilling)
    victim.kill()
    try:
        response = await asked
        assert response.status_code == 200
        told = await explained(client, response.headers[HEADER])
        ledger = (await client.get("/v1/ledger")).json()
    finally:
        await restore(router, victim)
    legs = [leg for attempt in told["prompts"][0]["attempts"] for leg in attempt["prefills"]]
    assert legs[0]["worker"] == victim.name
    assert legs[0]["outcome"] == "unavailable"
    assert legs[-1]["outcome"] == "done"
    assert legs[-1]["worker"] != victim.name
    assert told["pair"] == {"prefill": legs[-1]["worker"], "decode": "decode-0"}
    whys = {one["worker"]: one["why"] for one in legs[-1]["candidates"]}
    assert whys[legs[-1]["worker"]] == "taken"
    assert whys[victim.name] == "failed_this_prompt"
    total = sum(told["parts_ms"].values()) + told["residual_ms"]
    assert total == pytest.approx(told["total_ms"], abs=1e-6)
    assert told["parts_ms"]["retry"] > 0
    problems = {books["worker"]: books["problem"] for books in ledger["workers"]}
    assert problems.pop(victim.name) == "unavailable"
    assert set(problems.values()) == {None}


async def restore(router: RouterProcess, victim: WorkerProcess) -> None:
    """The router knows it again, too."""
    victim.start_again()
    victim.wait_ready()
    await asyncio.to_thread(router.wait_knows_all)


async def test_the_page_shows_it(
    cluster: Cluster, router: RouterProcess, client: httpx.AsyncClient
) -> None:
    """Of real workers, in a browser: a chat streams in, its bars add up to its own timings, and a
    worker that is killed is seen to be gone, and back."""
    before = router.metrics()
    async with chromium() as browser, page_at(browser, router.url) as page:
        await live(page)
        await page.get_by_text("Sampling").click()
        await page.get_by_label("Max tokens").fill("1000")
        await page.get_by_label("Your message").fill("Pass the baton. " * 60)
        await page.keyboard.press("Enter")
        text = page.locator(".answer-text")
        await expect(text).not_to_be_empty()
        await expect(page.locator("article.assistant")).to_have_attribute("aria-busy", "true")
        early = await text.inner_text()
        await page.wait_for_selector("article.assistant .waterfall")
        whole = await text.inner_text()
        assert whole.startswith(early)
        assert len(whole) > len(early)
        after = router.metrics()
        (first, rest), rows = await bars(page, "article.assistant"), page.locator(".row")
        told = await explained(client, (await client.get("/v1/requests")).json()["data"][0]["id"])
        for bar, total in ((first, told["total_ms"]), (rest, told["rest_ms"])):
            assert sum(bar["parts"].values()) == pytest.approx(total, abs=1e-6)
        measured_s = grown(before, after, "baton_time_to_first_token_seconds_sum")
        own_ms = first["parts"]["respond"]
        tolerance_ms = 1 + told["clock_error_ms"]
        assert first["total"] - own_ms == pytest.approx(measured_s * 1e3, abs=tolerance_ms)
        measured_s = grown(before, after, "baton_request_duration_seconds_sum")
        assert first["total"] + rest["total"] == pytest.approx(measured_s * 1e3, abs=5)
        await expect(rows.first).to_contain_text("→ decode-0")
        victim = cluster.workers[2]
        victim.kill()
        try:
            dead = page.locator(".worker[data-ready=false]")
            await expect(dead).to_contain_text(victim.name)
            await expect(page.locator("#notices")).to_contain_text(
                f"{victim.name} takes no requests"
            )
        finally:
            await restore(router, victim)
        await expect(dead).to_have_count(0)


async def test_only_the_last_requests_are_known(client: httpx.AsyncClient) -> None:
    ids = []
    for _ in range(9):
        response = await client.post("/v1/completions", json=body_of(7, 4, max_tokens=1))
        ids.append(response.headers[HEADER])
    listed = [one["id"] for one in (await client.get("/v1/requests")).json()["data"]]
    assert listed == ids[:0:-1]
    for name in (ids[0], "unknown"):
        response = await client.get(f"/v1/requests/{name}")
        assert response.status_code == 404
        assert response.json()["error"]["code"] == "request_not_found"


async def test_blocks_are_the_request_s_while_it_runs(
    cluster: Cluster, client: httpx.AsyncClient
) -> None:
    body = body_of(9, 1200, max_tokens=300, stream=True)
    async with client.stream("POST", "/v1/completions", json=body) as response:
        owner = f"{response.headers[HEADER]}-0"
        lines = response.aiter_lines()
        async for line in lines:
            if line.startswith("data: {"):
                break
        told = (await client.get("/v1/ledger")).json()
        for books in told["workers"]:
            assert books["adds_up"]
            assert (books["problem"], books["violations"]) == (None, 0)
        (decode,) = (books for books in told["workers"] if books["role"] == "decode")
        own = [entry for entry in decode["entries"] if entry["owner"] is not None]
        assert {entry["owner"] for entry in own} == {owner}
        held = sum(entry["count"] for entry in own if entry["state"] in ("held", "promised"))
        assert held >= 1200 // 16
        assert all(entry["has_call"] for entry in own)
        assert told["orphans"] == []
        assert [line async for line in lines][-2:] == ["data: [DONE]", ""]
    cluster.assert_all_back()
    told = (await client.get("/v1/ledger")).json()
    owners = [entry["owner"] for books in told["workers"] for entry in books["entries"]]
    assert set(owners) == {None}
