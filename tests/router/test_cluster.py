"""`GET /v1/cluster` and its events: what they say is what there is; viewers cost little, have a
bound, and leave nothing behind."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from protos import serving_pb2 as pb
from tests.router.conftest import RunningRouter, StartRouter
from tests.router.fake_workers import FakeWorker, GenerateCall, PrefillCall, fake_cluster, until
from tests.router.test_full_queues import fill

HEADER = "x-baton-request-id"


class Viewer:
    """Reads events of one connection; keeps the last of each topic."""

    def __init__(self, response: httpx.Response) -> None:
        self._lines = response.aiter_lines()
        self.latest: dict[str, Any] = {}
        self.num_events = 0

    async def next(self) -> str:
        """The topic that was told of."""
        topic = ""
        async for line in self._lines:
            if line.startswith("event: "):
                topic = line.removeprefix("event: ")
            elif line.startswith("data: "):
                self.latest[topic] = json.loads(line.removeprefix("data: "))
                self.num_events += 1
                return topic
            elif line.startswith(":"):
                return "quiet"
        return "over"

    async def until(self, condition: Any, timeout_s: float = 3.0) -> None:
        async with asyncio.timeout(timeout_s):
            while not condition(self.latest):
                assert await self.next() != "over"


@asynccontextmanager
async def viewer(router: RunningRouter) -> AsyncIterator[Viewer]:
    async with router.http.stream("GET", "/v1/cluster/events") as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        yield Viewer(response)


def busy(worker: FakeWorker[Any, Any]) -> None:
    status = worker.status
    status.num_running, status.num_waiting, status.num_awaiting_kv = 3, 2, 1
    status.num_blocks, status.block_size, status.kv_token_nbytes = 100, 16, 512
    status.queue_ms, status.generation = 40, 0xBEEF
    status.blocks.CopyFrom(pb.BlockLedger(free=40, cached=30, held=15, in_flight=5, promised=10))
    status.fabric.CopyFrom(pb.FabricLedger(send_slots_used=1, recv_slots_used=2, transfers=4))


def of(told: dict[str, Any], name: str) -> dict[str, Any]:
    (one,) = (worker for worker in told["workers"] if worker["name"] == name)
    assert isinstance(one, dict)
    return one


async def test_workers_as_they_say_they_are(
    start_router: StartRouter, answer: Sequence[int]
) -> None:
    async with fake_cluster(answer) as cluster, start_router(cluster) as router:
        busy(cluster.decodes[0])
        await until(lambda: router.router.workers.decodes[0].status.num_running == 3)
        told = (await router.http.get("/v1/cluster")).json()
    assert told["object"] == "cluster"
    assert (told["cluster"]["model"], told["cluster"]["mode"]) == ("tiny", "disaggregated")
    assert told["cluster"]["ready"]
    assert [(one["role"], one["ready"]) for one in told["cluster"]["workers"]] == [
        ("prefill", True), ("decode", True),
    ]  # fmt: skip
    decode = of(told["cluster"], "decode-0")
    assert decode["blocks"] == {
        "free": 40, "cached": 30, "pinned": 0, "promised": 10, "held": 15, "in_flight": 5,
    }  # fmt: skip
    assert sum(decode["blocks"].values()) == decode["num_blocks"]
    numbers = [decode[f"num_{what}"] for what in ("running", "waiting", "awaiting_kv", "transfers")]
    assert numbers == [3, 2, 1, 4]
    assert (decode["queue_ms"], decode["generation"], decode["problem"]) == (40, "beef", None)
    assert (decode["send_slots_used"], decode["recv_slots_used"]) == (1, 2)
    assert (told["requests"], told["cluster"]["handoffs"]) == ([], [])
    assert told["latency"]["ttft"]["count"] == 0


async def test_a_handoff_is_seen_from_begin_to_end(
    start_router: StartRouter, answer: Sequence[int]
) -> None:
    async with (
        fake_cluster(answer) as cluster,
        start_router(cluster, inactivity_s=5.0) as router,
    ):
        told_0, shipped = asyncio.Event(), asyncio.Event()

        async def slowly(call: PrefillCall) -> None:
            await told_0.wait()
            await say(call, pb.PrefillEvent(first_token=pb.FirstToken(token_id=answer[0])))
            await shipped.wait()
            call.relay.commit(call.request.ticket.transfer_id).set_result([answer[0]])
            await say(call, pb.PrefillEvent(shipped=pb.Shipped()))

        cluster.prefills[0].scripts.append(slowly)
        async with viewer(router) as watching:
            asked = asyncio.create_task(router.complete())
            await watching.until(lambda told: states(told) == ["computing"])
            assert watching.latest["cluster"]["num_prompts"] == 1
            await watching.until(lambda told: [r["state"] for r in told["requests"]] == ["running"])
            told_0.set()
            await watching.until(lambda told: states(told) == ["shipping"])
            shipped.set()
            response = await asked
            await watching.until(lambda told: states(told) == ["done"])
            await watching.until(lambda told: told["latency"]["tpot"]["count"] == 1)
            await watching.until(lambda told: told["requests"][0]["state"] == "completed")
            (moved,) = watching.latest["cluster"]["handoffs"]
            assert (moved["prefill"], moved["decode"]) == ("prefill-0", "decode-0")
            assert moved["end_ms"] > moved["begin_ms"]
            assert moved["nbytes"] == 4096
            (line,) = watching.latest["requests"]
            assert line["id"] == response.headers[HEADER]
            assert line["num_output_tokens"] == len(answer)
            usage = response.json()["usage"]
            assert line["num_prompt_tokens"] == usage["prompt_tokens"] == moved["num_tokens"]
            assert line["end_ms"] > line["read_ms"] > 0
            ttft_ms = watching.latest["latency"]["ttft"]["p50_ms"]
            assert ttft_ms == pytest.approx(line["ttft_ms"], rel=0.02)


async def say(call: PrefillCall, event: pb.PrefillEvent) -> None:
    """With timings, as real workers do."""
    said = event.first_token if event.HasField("first_token") else event.shipped
    said.timings.CopyFrom(pb.Timings(kv_nbytes=4096, kv_frames=1))
    await call.context.write(event)


def states(told: dict[str, Any]) -> list[str]:
    return [one["state"] for one in told["cluster"]["handoffs"]] if "cluster" in told else []


async def test_a_failed_leg_and_a_prompt_in_line(
    start_router: StartRouter, answer: Sequence[int]
) -> None:
    async with fake_cluster(answer) as cluster, start_router(cluster) as router:
        (prefill,) = cluster.prefills
        fill(prefill, 1)
        await until(lambda: not router.router.workers.prefills[0].has_queue_room)
        asked = asyncio.create_task(router.complete())
        await until(lambda: router.router.dispatcher.num_in_line == 1)
        told = (await router.http.get("/v1/cluster")).json()
        prefill.status.queue_ms = 0
        assert (await asked).status_code == 200
        after = (await router.http.get("/v1/cluster")).json()
    assert told["cluster"]["num_in_line"] == told["cluster"]["num_prompts"] == 1
    assert [one["state"] for one in told["cluster"]["handoffs"]] == ["ended"]
    assert told["cluster"]["handoffs"][0]["outcome"] == "queue_full"
    assert after["cluster"]["num_in_line"] == after["cluster"]["num_prompts"] == 0
    assert after["requests"][0]["num_failures"] == 1


async def test_a_worker_that_dies_and_comes_back(
    start_router: StartRouter, answer: Sequence[int]
) -> None:
    async with (
        fake_cluster(answer) as cluster,
        start_router(cluster) as router,
        viewer(router) as watching,
    ):
        await watching.until(lambda told: "cluster" in told)
        await cluster.prefills[0].kill()
        await watching.until(lambda told: not of(told["cluster"], "prefill-0")["ready"])
        assert of(watching.latest["cluster"], "prefill-0")["problem"]
        assert not watching.latest["cluster"]["ready"]
        await cluster.prefills[0].start()
        await watching.until(lambda told: of(told["cluster"], "prefill-0")["ready"])


async def test_nothing_new_is_not_told_again(
    start_router: StartRouter, answer: Sequence[int]
) -> None:
    async with (
        fake_cluster(answer) as cluster,
        start_router(cluster) as router,
        viewer(router) as watching,
    ):
        await watching.until(lambda told: len(told) == 3 and told["cluster"]["ready"])
        number = watching.num_events
        assert await watching.next() == "quiet"
        assert watching.num_events == number


async def test_viewers_share_a_producer_and_have_a_bound(
    start_router: StartRouter, answer: Sequence[int]
) -> None:
    async with (
        fake_cluster(answer) as cluster,
        start_router(cluster, max_viewers=2) as router,
    ):
        feed = router.router.cluster.feed
        async with viewer(router) as one, viewer(router) as other:
            await one.next()
            producer = feed._producer
            await other.next()
            assert feed._producer is producer
            refused = await router.http.get("/v1/cluster/events")
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
            assert refused.json()["error"]["code"] == "too_many_viewers"
        await until(lambda: feed.num_viewers == 0)
        assert feed._producer is None
        async with viewer(router) as again:
            await again.until(lambda told: len(told) == 3)


async def test_a_slow_viewer_is_left_and_delays_nobody(
    start_router: StartRouter, answer: Sequence[int]
) -> None:
    async with (
        fake_cluster(answer) as cluster,
        start_router(cluster, send_timeout_s=0.3) as router,
    ):
        feed = router.router.cluster.feed
        feed._topics = {**feed._topics, "noise": lambda: f'"{"x" * 2**20}{feed._versions}"'}
        feed._versions["noise"] = 0
        url = httpx.URL(router.url)
        _, writer = await asyncio.open_connection(url.host, url.port, limit=1024)
        writer.write(b"GET /v1/cluster/events HTTP/1.1\r\nHost: router\r\n\r\n")
        try:
            await until(lambda: feed.num_viewers == 1)
            assert (await router.complete()).status_code == 200
            await until(lambda: feed.num_viewers == 0, timeout_s=8)
            await until(lambda: len(router.server.server_state.connections) == 1)  # not its own
        finally:
            writer.transport.abort()


async def test_the_end_of_the_router_is_told(
    start_router: StartRouter, answer: Sequence[int]
) -> None:
    async with (
        fake_cluster(answer) as cluster,
        start_router(cluster, shutdown_grace_s=5.0) as router,
        viewer(router) as watching,
    ):
        await watching.until(lambda told: "cluster" in told)
        router.server.should_exit = True
        await watching.until(lambda told: "bye" in told, timeout_s=1.0)


async def test_a_bug_in_reading_ends_viewers_instead_of_leaving_them_in_silence(
    start_router: StartRouter, answer: Sequence[int]
) -> None:
    def broken() -> str:
        raise ZeroDivisionError

    async with fake_cluster(answer) as cluster, start_router(cluster) as router:
        feed = router.router.cluster.feed
        feed._topics = {"cluster": broken}
        with pytest.raises(httpx.RemoteProtocolError):
            async with viewer(router) as watching:
                await watching.next()
        await until(lambda: feed.num_viewers == 0)


async def test_what_is_kept_of_nothing(start_router: StartRouter, answer: Sequence[int]) -> None:
    """Without records there are no requests to show, and all else is there."""
    async with (
        fake_cluster(answer) as cluster,
        start_router(cluster, explain_requests=0) as router,
    ):
        await router.complete()
        told = (await router.http.get("/v1/cluster")).json()
    assert (told["requests"], told["cluster"]["handoffs"]) == ([], [])
    assert told["latency"]["ttft"]["count"] == 1


async def test_no_text_is_told(start_router: StartRouter, answer: Sequence[int]) -> None:
    async with fake_cluster(answer) as cluster, start_router(cluster) as router:
        cluster.decodes[0].scripts.append(GenerateCall.run_happily)
        await router.complete(prompt="a most secret prompt")
        told = (await router.http.get("/v1/cluster")).text
    assert "secret" not in told
    assert "Paris" not in told
