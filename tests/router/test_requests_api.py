"""`GET /v1/requests`: what it says of a request, while it runs and afterwards, and for how long."""

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import grpc
import pytest

from tests.router.chrome_trace import check_trace
from tests.router.conftest import RunningRouter, StartRouter
from tests.router.fake_workers import (
    GenerateCall,
    fake_cluster,
    until,
)
from tests.router.test_full_queues import fill
from tests.router.timed_relay import AHEAD_NS, MS, hosts_apart, relay_timed

HEADER = "x-baton-request-id"


async def explanation(router: RunningRouter, request_id: str) -> dict[str, Any]:
    response = await router.http.get(f"/v1/requests/{request_id}")
    assert response.status_code == 200, response.text
    told: dict[str, Any] = response.json()
    return told


def add_up(told: dict[str, Any]) -> None:
    total = sum(told["parts_ms"].values()) + told["residual_ms"]
    assert total == pytest.approx(told["total_ms"], abs=1e-6)
    assert told["residual_ms"] >= 0
    rest = sum(told["rest_parts_ms"].values()) + (told["rest_residual_ms"] or 0)
    assert rest == pytest.approx(told["rest_ms"] or 0, abs=1e-6)
    if told["rest_ms"] is not None and told["end_ms"] is not None:
        whole = max(told["end_ms"], told["first_byte_ms"]) - told["read_ms"]
        assert told["total_ms"] + told["rest_ms"] == pytest.approx(whole, abs=1e-6)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_relayed_request(
    start_router: StartRouter, answer: Sequence[int], stream: bool
) -> None:
    async with hosts_apart(answer, start_router, num_prefills=2) as (cluster, router):
        relay_timed(cluster)
        response = await router.complete(stream=stream)
        told = await explanation(router, response.headers[HEADER])

    add_up(told)
    assert (told["state"], told["model"], told["error"]) == ("completed", "tiny", None)
    assert told["pair"] == {"decode": "decode-0", "prefill": "prefill-0"}
    assert told["streamed"] == stream
    (prompt,) = told["prompts"]
    assert prompt["samples"] == [{"num_tokens": len(answer), "finish_reason": "stop"}]
    (attempt,) = prompt["attempts"]
    assert attempt["local_prefill_reason"] == "cheaper_tail"
    (leg,), decode = attempt["prefills"], attempt["decode"]
    assert (attempt["outcome"], leg["outcome"], decode["outcome"]) == ("done", "done", "done")
    assert [stage["stage"] for stage in leg["stages"]] == ["queue", "build", "ship"]
    ranks = [(one["rank"], one["nbytes"], *one["stages"]) for one in leg["ranks"]]
    assert [rank[:2] for rank in ranks] == [(0, 2048), (1, 2048)]
    assert [rank[2]["busy_ms"] for rank in ranks] == [1, 5]
    assert ranks[1][2] == leg["stages"][2], "the slowest rank's"
    assert decode["ranks"] == []
    assert leg["kv"] == {
        "nbytes": 4096, "frames": 3, "codec": "raw", "transports": ["posix"], "offers": 1,
    }  # fmt: skip
    assert [one["why"] for one in leg["candidates"]] == ["taken", "later_name"]
    for one, ahead_ns in ((leg, AHEAD_NS), (decode, -AHEAD_NS)):
        error_ms = one["clock_error_ms"]
        assert one["clock_offset_ms"] == pytest.approx(ahead_ns / MS, abs=error_ms)
    error_ms = leg["clock_error_ms"] + decode["clock_error_ms"]
    assert prompt["exposed_error_ms"] == pytest.approx(error_ms)
    assert prompt["exposed_handoff_ms"] == pytest.approx(6, abs=error_ms + 0.01)
    assert prompt["exposed_share"] == pytest.approx(
        prompt["exposed_handoff_ms"] / told["ttft_ms"], rel=1e-6
    )
    # On our clock, although both were hours away: within the request, in their order.
    build = leg["stages"][1]
    assert told["read_ms"] - error_ms < build["begin_ms"] < build["end_ms"]
    assert build["end_ms"] < prompt["first_token_ms"] + error_ms
    assert told["parts_ms"]["prefill_build"] == pytest.approx(8, abs=error_ms + 0.01)
    name = "baton_handoff_exposed_seconds"
    assert router.metric(f"{name}_count") == 1
    assert router.metric(f"{name}_sum") * 1e3 == pytest.approx(prompt["exposed_handoff_ms"])
    assert router.metric("baton_request_stage_seconds_count", stage="prefill_build") == 1
    ttft_s = router.metric("baton_time_to_first_token_seconds_sum")
    assert told["ttft_ms"] == pytest.approx(ttft_s * 1e3, abs=1e-3)


async def test_as_a_chrome_trace(start_router: StartRouter, answer: Sequence[int]) -> None:
    async with hosts_apart(answer, start_router, num_prefills=1) as (cluster, router):
        relay_timed(cluster)
        response = await router.complete()
        path = f"/v1/requests/{response.headers[HEADER]}"
        document = (await router.http.get(f"{path}?format=perfetto")).json()
        many = await router.complete(prompt=["a", "b", "c"], stream=True)
        path = f"/v1/requests/{many.headers[HEADER]}"
        check_trace((await router.http.get(f"{path}?format=perfetto")).json())
    slices = check_trace(document)
    named = {e["pid"]: e["args"]["name"] for e in document["traceEvents"]
             if e["name"] == "process_name"}  # fmt: skip
    assert set(named.values()) == {"router", "prefill-0", "decode-0"}
    stages = {(named[event["pid"]], event["cat"]) for event in slices}
    assert {("prefill-0", "build"), ("prefill-0", "ship"), ("decode-0", "attach")} <= stages
    assert ("prefill-0", "ship rank 1") in stages
    assert {("router", "request"), ("router", "validate"), ("router", "attempts")} <= stages
    assert [event["ph"] for event in document["traceEvents"] if event["ph"] in "sf"] == ["s", "f"]


async def test_a_failed_worker_is_told(start_router: StartRouter, answer: Sequence[int]) -> None:
    async with fake_cluster(answer, num_prefills=2) as cluster, start_router(cluster) as router:
        await until(lambda: all(worker.is_ready for worker in router.router.workers.prefills))
        cluster.prefills[0].scripts.append(
            lambda call: call.fail(grpc.StatusCode.INTERNAL, "on fire")
        )

        async def renew(call: GenerateCall) -> None:
            await call.reserve()
            await call.renewals.get()
            await call.relay.commit(await call.reserve())
            await call.say_rest(0)

        cluster.decodes[0].scripts.append(renew)
        response = await router.complete()
        told = await explanation(router, response.headers[HEADER])
    add_up(told)
    (attempt,) = told["prompts"][0]["attempts"]
    failed, done = attempt["prefills"]
    assert (failed["worker"], failed["outcome"]) == ("prefill-0", "internal")
    assert failed["detail"] == "on fire"
    assert (done["worker"], done["outcome"]) == ("prefill-1", "done")
    assert [one["why"] for one in done["candidates"]] == ["taken", "failed_this_prompt"]
    assert told["pair"] == {"decode": "decode-0", "prefill": "prefill-1"}


@pytest.mark.parametrize("max_tokens", [50, 1])
async def test_a_wait_in_the_line_is_told(
    start_router: StartRouter, answer: Sequence[int], max_tokens: int
) -> None:
    """Also where a prefill worker alone serves the prompt."""
    async with fake_cluster(answer) as cluster, start_router(cluster) as router:
        (prefill,) = cluster.prefills
        fill(prefill, 1)
        await until(lambda: not router.router.workers.prefills[0].has_queue_room)
        asked = asyncio.create_task(router.complete(max_tokens=max_tokens))
        await until(lambda: len(prefill.requests) == 1)
        await asyncio.sleep(0.1)
        prefill.status.queue_ms = 0
        told = await explanation(router, (await asked).headers[HEADER])
    add_up(told)
    (prompt,) = told["prompts"]
    refused, served = prompt["attempts"]
    assert (refused["outcome"], served["outcome"]) == ("queue_full", "done")
    assert refused["prefills"][0]["outcome"] == "queue_full"
    assert "2.5 s" in refused["prefills"][0]["detail"]
    (wait,) = prompt["waits"]
    assert told["parts_ms"]["line"] == pytest.approx(wait["end_ms"] - wait["begin_ms"])
    assert told["parts_ms"]["line"] > 50
    assert router.metric("baton_request_stage_seconds_count", stage="line") == 1
    prefill_alone = max_tokens == 1
    assert (told["pair"]["decode"] is None) == prefill_alone


async def test_a_running_and_a_failed_request(
    start_router: StartRouter, answer: Sequence[int]
) -> None:
    async with (
        fake_cluster(answer) as cluster,
        start_router(cluster, max_attempts=1) as router,
    ):
        going_on = asyncio.Event()

        async def stuck(call: GenerateCall) -> None:
            await call.reserve()
            await call.beating(going_on.wait())
            await call.fail(grpc.StatusCode.INTERNAL, "on fire")

        cluster.decodes[0].scripts.append(stuck)
        request = asyncio.create_task(router.complete())
        await until(lambda: bool(cluster.prefills[0].requests))
        (one,) = (await router.http.get("/v1/requests")).json()["data"]
        running = await explanation(router, one["id"])
        going_on.set()
        response = await request
        failed = await explanation(router, one["id"])
    assert response.status_code == 503
    assert response.headers[HEADER] == one["id"]
    assert one["state"] == running["state"] == "running"
    add_up(running)
    assert running["end_ms"] is None
    assert running["prompts"][0]["attempts"][0]["decode"]["outcome"] is None
    add_up(failed)
    assert failed["state"] == "unavailable"
    assert (failed["error"]["status"], failed["error"]["code"]) == (503, "workers_failed")
    assert failed["prompts"][0]["attempts"][0]["decode"]["outcome"] == "internal"


async def test_every_answer_is_named(start_router: StartRouter, answer: Sequence[int]) -> None:
    async with fake_cluster(answer) as cluster, start_router(cluster) as router:
        answers = [
            await router.complete(),
            await router.complete(stream=True),
            await router.complete(nonsense=1),
            await router.http.post("/v1/completions", content=b"{"),
            await router.http.get("/v1/models"),
            await router.http.get("/nowhere"),
            await router.http.get("/v1/requests"),
            await router.http.get("/v1/requests/unknown"),
            await router.complete(prompt="a", extra_headers=1),
        ]
        ids = [response.headers[HEADER] for response in answers]
        assert len(set(ids)) == len(ids)
        refused = await explanation(router, ids[2])
        assert refused["state"] == "rejected"
        assert "nonsense" in refused["error"]["message"]
        assert refused["total_ms"] is not None
        broken = await explanation(router, ids[3])
        assert (broken["state"], broken["total_ms"]) == ("rejected", None)
        theirs = {HEADER: "mine"}
        response = await router.http.get("/v1/models", headers=theirs)
        assert response.headers[HEADER] != "mine", "ours must not collide"


async def test_a_bug_is_named_too(start_router: StartRouter, answer: Sequence[int]) -> None:
    async with fake_cluster(answer) as cluster, start_router(cluster) as router:
        router.router.records = None  # type: ignore[assignment]
        response = await router.http.get("/v1/requests")
        assert response.status_code == 500
        assert len(response.headers[HEADER]) == 32


async def test_what_is_not_there(start_router: StartRouter, answer: Sequence[int]) -> None:
    async with (
        fake_cluster(answer) as cluster,
        start_router(cluster, explain_requests=2) as router,
    ):
        ids = [(await router.complete()).headers[HEADER] for _ in range(3)]
        listed = (await router.http.get("/v1/requests")).json()
        assert [one["id"] for one in listed["data"]] == [ids[2], ids[1]]
        for name in (ids[0], "unknown"):
            response = await router.http.get(f"/v1/requests/{name}")
            assert response.status_code == 404
            error = response.json()["error"]
            assert (error["type"], error["code"]) == ("invalid_request_error", "request_not_found")
        response = await router.http.get(f"/v1/requests/{ids[1]}?format=xml")
        assert (response.status_code, response.json()["error"]["param"]) == (400, "format")
    async with fake_cluster(answer) as cluster, start_router(cluster, explain_requests=0) as router:
        name = (await router.complete()).headers[HEADER]
        assert (await router.http.get(f"/v1/requests/{name}")).status_code == 404
        assert (await router.http.get("/v1/requests")).json()["data"] == []
        assert router.metric("baton_request_stage_seconds_count", stage="validate") == 1


async def test_no_text_is_kept(start_router: StartRouter, answer: Sequence[int]) -> None:
    async with fake_cluster(answer) as cluster, start_router(cluster) as router:
        response = await router.complete(prompt="a most secret prompt")
        told = json.dumps(await explanation(router, response.headers[HEADER]))
    assert "secret" not in told
    assert "Paris" not in told
