"""`GET /v1/ledger`: whose everything is, who does not answer, and what is nobody's."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from protos import serving_pb2 as pb
from router.live import LivePrompts
from tests.router.conftest import RunningRouter, StartRouter
from tests.router.fake_workers import GenerateCall, fake_cluster, until

GRACE_S = 0.2


def entry(owner: str, state: pb.LedgerState.ValueType, count: int, **more: Any) -> pb.LedgerEntry:
    return pb.LedgerEntry(owner=owner, state=state, count=count, **{"has_call": True, **more})


def books(*owned: pb.LedgerEntry, num_free: int = 5) -> pb.WorkerLedger:
    """Of ten blocks."""
    return pb.WorkerLedger(
        num_blocks=10,
        num_send_slots=4,
        num_recv_slots=4,
        entries=[entry("", pb.LEDGER_STATE_FREE, num_free), *owned],
    )


async def read(router: RunningRouter) -> dict[str, Any]:
    response = await router.http.get("/v1/ledger")
    assert response.status_code == 200
    told: dict[str, Any] = response.json()
    return told


async def test_owners_of_live_requests_and_orphans(
    start_router: StartRouter, answer: Sequence[int]
) -> None:
    async with (
        fake_cluster(answer) as cluster,
        start_router(cluster, ledger_grace_s=GRACE_S, ledger_interval_s=0.05) as router,
    ):
        (decode,) = cluster.decodes
        going_on = asyncio.Event()

        async def slowly(call: GenerateCall) -> None:
            own = call.request.request_id
            decode.ledger = books(
                entry(own, pb.LEDGER_STATE_HELD, 2, num_shared=1, age_ms=60_000),
                entry(own, pb.LEDGER_STATE_RECEIVING, 3, age_ms=5),
                entry("stranger", pb.LEDGER_STATE_HELD, 2, age_ms=60_000),
                entry("stranger", pb.LEDGER_STATE_IN_FLIGHT, 1, age_ms=60_000, has_call=False),
                entry("newcomer", pb.LEDGER_STATE_SENDING, 1, age_ms=10, has_call=False),
            )
            await call.beating(going_on.wait())
            await call.say_rest(0)

        decode.scripts.append(slowly)
        request = asyncio.create_task(router.complete())
        await until(lambda: len(decode.ledger.entries) > 0)
        told = await read(router)
        await until(lambda: router.metric("baton_ledger_orphans", worker="decode-0") == 1)
        name = "baton_ledger_owners_without_call"
        assert router.metric(name, worker="decode-0") == 2
        assert router.metric("baton_ledger_orphans", worker="prefill-0") == 0
        going_on.set()
        await request
        # It has just ended here: the worker may not know yet.
        just_after = await read(router)
        await asyncio.sleep(1.5 * GRACE_S)
        later = await read(router)

    by_name = {one["worker"]: one for one in told["workers"]}
    assert set(by_name) == {"decode-0", "prefill-0"}
    own = by_name["decode-0"]
    assert (own["role"], own["problem"], own["adds_up"]) == ("decode", None, True)
    assert own["entries"][1] == {
        "owner": cluster.decodes[0].requests[0].request_id,
        "state": "held",
        "count": 2,
        "num_shared": 1,
        "age_ms": 60_000,
        "has_call": True,
    }
    assert own["entries"][0]["owner"] is None
    (orphan,) = told["orphans"]
    assert orphan == {
        "worker": "decode-0",
        "owner": "stranger",
        "age_ms": 60_000,
        "has_call": True,
        "counts": {"held": 2, "in_flight": 1},
    }
    assert [one["owner"] for one in just_after["orphans"]] == ["stranger"]
    assert len(later["orphans"]) == 2


async def test_who_does_not_answer_is_named(
    start_router: StartRouter, answer: Sequence[int]
) -> None:
    async with fake_cluster(answer) as cluster, start_router(cluster) as router:
        cluster.prefills[0].ledger = books(num_free=9)
        await cluster.decodes[0].kill()
        told = await read(router)
        by_name = {one["worker"]: one for one in told["workers"]}
        assert by_name["decode-0"]["problem"] == "unavailable"
        assert by_name["prefill-0"]["problem"] is None
        assert not by_name["prefill-0"]["adds_up"], "nine of ten blocks"
        assert router.metric("baton_ledger_unanswered", worker="decode-0") == 1
        assert router.metric("baton_ledger_unanswered", worker="prefill-0") == 0


async def test_a_worker_that_hangs_costs_its_deadline(
    start_router: StartRouter, answer: Sequence[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with (
        fake_cluster(answer) as cluster,
        start_router(cluster, status_timeout_s=0.3) as router,
    ):

        async def hang(*_: object) -> pb.WorkerLedger:
            await asyncio.sleep(5)
            raise AssertionError("nobody waits so long")

        monkeypatch.setattr(cluster.decodes[0], "Ledger", hang)
        await cluster.decodes[0].kill()
        await cluster.decodes[0].start()
        await until(lambda: router.router.dispatcher.is_ready)
        clock = asyncio.get_running_loop().time
        began = clock()
        told = await read(router)
        assert clock() - began < 2
        problems = {one["worker"]: one["problem"] for one in told["workers"]}
        assert problems == {"decode-0": "deadline_exceeded", "prefill-0": None}


def test_a_prompt_may_own_something_for_a_while_after_its_end() -> None:
    now = 0.0
    live = LivePrompts(10.0, lambda: now)
    assert not live.may_own("a")
    with live.running("a"):
        now = 1000.0
        assert live.may_own("a")
    now = 1009.0
    assert live.may_own("a")
    with live.running("b"):
        now = 1011.0
        assert not live.may_own("a")
        assert live.may_own("b")
    assert len(live._ended) == 1
