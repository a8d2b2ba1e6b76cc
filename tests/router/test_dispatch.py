"""Dispatch against fake workers: every fault costs time and not the answer."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field

import grpc
import pytest
from prometheus_client import CollectorRegistry

from protos import serving_pb2 as pb
from router.dispatch import Dispatcher
from router.errors import ApiError, BadRequest, NoWorkerReady, RequestTimedOut, WorkersFailed
from router.metrics import RouterMetrics
from router.request import FinishReason, RequestId, SamplingParams, ValidPrompt
from router.workers import WorkerSet
from tests.router.conftest import config_for, tasks_of_router
from tests.router.fake_workers import (
    FakeCluster,
    GenerateCall,
    PrefillCall,
    fake_cluster,
    until,
)

ANSWER = (11, 12, 13, 14)
STATUS = grpc.StatusCode


def make_prompt(max_tokens: int = 50) -> ValidPrompt:
    sampling = SamplingParams(
        max_tokens=max_tokens,
        temperature=0.5,
        top_k=7,
        top_p=0.25,
        seed=1 << 63,
        stop_token_ids=(9,),
        ignore_eos=True,
    )
    return ValidPrompt(RequestId("r-0"), (1, 2, 3), sampling)


@dataclass
class Client:
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    wanted: int = 1000

    def take(self, token_ids: Sequence[int], finish_reason: FinishReason | None) -> bool:
        self.token_ids += token_ids
        self.finish_reason = finish_reason
        return len(self.token_ids) < self.wanted


@dataclass
class Bench:
    """A dispatcher over a fake cluster."""

    cluster: FakeCluster
    dispatcher: Dispatcher
    workers: WorkerSet
    registry: CollectorRegistry

    async def run(self, prompt: ValidPrompt | None = None, wanted: int = 1000) -> Client:
        client = Client(wanted=wanted)
        await self.dispatcher.run(prompt or make_prompt(), client.take)
        return client

    def retries(self, leg: str, reason: str) -> float:
        labels = {"leg": leg, "reason": reason}
        return self.registry.get_sample_value("baton_retries_total", labels) or 0.0


StartBench = Callable[..., AbstractAsyncContextManager[Bench]]


@pytest.fixture
def start_bench() -> StartBench:
    @asynccontextmanager
    async def start(
        num_prefills: int = 1, num_decodes: int = 1, **changes: object
    ) -> AsyncIterator[Bench]:
        async with fake_cluster(
            ANSWER, num_prefills=num_prefills, num_decodes=num_decodes
        ) as cluster:
            config = config_for(cluster, **changes)
            registry = CollectorRegistry()
            workers = WorkerSet(config.decode, config.prefill, interval_s=0.05, timeout_s=0.5)
            dispatcher = Dispatcher(workers, config, RouterMetrics(registry, workers))
            workers.start()
            everyone = [*workers.decodes, *workers.prefills]
            await until(lambda: all(worker.is_ready for worker in everyone))
            yield Bench(cluster, dispatcher, workers, registry)
            await until(lambda: cluster.relay.num_open_calls == 0)
            assert [worker.load for worker in everyone] == [0] * len(everyone)
            await workers.close()
            assert not tasks_of_router()

    return start


async def test_two_calls_and_one_answer(start_bench: StartBench) -> None:
    async with start_bench() as bench:
        client = await bench.run()

        assert client.token_ids == list(ANSWER)
        assert client.finish_reason is FinishReason.STOP
        (generate,) = bench.cluster.decodes[0].requests
        (prefill,) = bench.cluster.prefills[0].requests
        assert not generate.local_prefill
        assert generate.prompt_token_ids == prefill.prompt_token_ids == [1, 2, 3]
        assert generate.sampling == prefill.sampling
        assert generate.sampling == pb.Sampling(
            max_tokens=50,
            temperature=0.5,
            top_k=7,
            top_p=0.25,
            seed=1 << 63,
            stop_token_ids=[9],
            ignore_eos=True,
        )
        assert [len(call.samples) for call in (generate, prefill)] == [1, 1]
        assert 0 < generate.remaining_ms <= 5000
        assert prefill.ticket.num_tokens == 3


async def test_token_0_goes_out_before_the_transfer_ends(start_bench: StartBench) -> None:
    async with start_bench() as bench:
        client = Client()
        shipping = bench.cluster.relay

        async def slow(call: PrefillCall) -> None:
            await call.first_token()
            await until(lambda: client.token_ids == [ANSWER[0]])
            assert not shipping.commits[call.request.ticket.transfer_id].done()
            await call.ship()

        bench.cluster.prefills[0].scripts.append(slow)
        await bench.dispatcher.run(make_prompt(), client.take)
        assert client.token_ids == list(ANSWER)


async def test_a_token_0_that_ends_the_answer(start_bench: StartBench) -> None:
    async with start_bench() as bench:

        async def only(call: PrefillCall) -> None:
            await call.first_token(reason=pb.FINISH_REASON_STOP)
            await call.hang()

        bench.cluster.prefills[0].scripts.append(only)
        client = await bench.run()
        assert client.token_ids == [ANSWER[0]]
        assert client.finish_reason is FinishReason.STOP


async def test_one_token_needs_no_handoff(start_bench: StartBench) -> None:
    async with start_bench() as bench:
        client = await bench.run(make_prompt(max_tokens=1))
        assert client.token_ids == [ANSWER[0]]
        assert client.finish_reason is FinishReason.LENGTH
        assert bench.cluster.decodes[0].requests == []
        assert not bench.cluster.prefills[0].requests[0].HasField("ticket")


async def test_colocated(start_bench: StartBench) -> None:
    async with start_bench(mode="colocated") as bench:
        for max_tokens in (50, 1):
            client = await bench.run(make_prompt(max_tokens))
            assert client.token_ids == list(ANSWER[:max_tokens])
        for request in bench.cluster.decodes[0].requests:
            assert (request.local_prefill, request.local_prefill_reason) == (True, "colocated")
        assert bench.cluster.prefills[0].requests == []


async def test_a_client_that_has_enough_ends_both_legs(start_bench: StartBench) -> None:
    async with start_bench() as bench:

        async def endless(call: GenerateCall) -> None:
            await call.reserve()
            for index, token_id in enumerate(ANSWER):
                await call.tokens(index, [token_id])
            await call.hang()

        bench.cluster.decodes[0].scripts.append(endless)
        client = await bench.run(wanted=2)
        assert client.token_ids == list(ANSWER[:2])


async def fail_at_once(call: PrefillCall) -> None:
    await call.fail(STATUS.UNAVAILABLE)


async def fail_after_token_0(call: PrefillCall) -> None:
    await call.first_token()
    await call.fail(STATUS.INTERNAL)


async def fall_silent(call: PrefillCall) -> None:
    await call.heartbeat()
    await call.hang()


async def end_early(call: PrefillCall) -> None:
    await call.heartbeat()


async def renewing(call: GenerateCall) -> None:
    """As a decode worker does: another ticket on the same stream."""
    first = await call.reserve()
    assert await call.beating(call.renewals.get()) == first
    second = await call.reserve()
    await call.relay.commit(second)
    await call.say_rest(0)


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (fail_at_once, "unavailable"),
        (fail_after_token_0, "internal"),
        (fall_silent, "silent"),
        (end_early, "ended_early"),
    ],
)
async def test_a_failed_prefill_leg_goes_to_another_worker(
    start_bench: StartBench, fault: Callable[[PrefillCall], None], reason: str
) -> None:
    async with start_bench(num_prefills=2) as bench:
        bench.cluster.decodes[0].scripts.append(renewing)
        first, second = bench.cluster.prefills
        first.scripts.append(fault)  # type: ignore[arg-type]
        client = await bench.run()

        assert client.token_ids == list(ANSWER)
        assert len(bench.cluster.decodes[0].requests) == 1
        assert len(first.requests) == len(second.requests) == 1
        assert list(second.requests[0].samples[0].output_token_ids) == []
        assert bench.retries("prefill", reason) == 1


async def test_without_another_prefill_worker_decode_does_it_alone(
    start_bench: StartBench,
) -> None:
    async with start_bench() as bench:
        bench.cluster.prefills[0].scripts.append(fail_after_token_0)
        client = await bench.run()

        assert client.token_ids == list(ANSWER)
        reserved, local = bench.cluster.decodes[0].requests
        assert not reserved.local_prefill
        assert (local.local_prefill, local.local_prefill_reason) == (True, "no_prefill_worker")
        assert local.samples[0].output_token_ids == [ANSWER[0]]
        labels = {"reason": "no_prefill_worker"}
        assert bench.registry.get_sample_value("baton_local_prefills_total", labels) == 1


async def test_one_token_survives_its_prefill_worker(start_bench: StartBench) -> None:
    async with start_bench() as bench:
        bench.cluster.prefills[0].scripts.append(fail_at_once)
        client = await bench.run(make_prompt(max_tokens=1))
        assert client.token_ids == [ANSWER[0]]
        assert bench.cluster.decodes[0].requests[0].local_prefill


async def test_a_second_ticket_voids_the_first_leg(start_bench: StartBench) -> None:
    async with start_bench() as bench:

        async def reserved_again(call: GenerateCall) -> None:
            await call.reserve()
            await until(lambda: bool(bench.cluster.prefills[0].requests))
            await call.relay.commit(await call.reserve())
            await call.say_rest(0)

        async def stuck(call: PrefillCall) -> None:
            while True:
                await call.heartbeat()
                await call.first_token()
                await call.hang()

        bench.cluster.decodes[0].scripts.append(reserved_again)
        bench.cluster.prefills[0].scripts.append(stuck)
        client = await bench.run()
        assert client.token_ids == list(ANSWER)
        assert len(bench.cluster.prefills[0].requests) == 2


async def test_a_contradiction_resumes_from_what_was_delivered(start_bench: StartBench) -> None:
    async with start_bench() as bench:

        client = Client()

        async def other_token(call: PrefillCall) -> None:
            await call.first_token(99)
            await until(lambda: client.token_ids == [99])
            await call.ship()

        bench.cluster.prefills[0].scripts.append(other_token)
        await bench.dispatcher.run(make_prompt(), client.take)
        # What the client has stands; decode's own idea of index 0 does not.
        assert client.token_ids == [99, *ANSWER[1:]]
        assert bench.cluster.decodes[0].requests[1].samples[0].output_token_ids == [99]
        assert bench.cluster.prefills[0].requests[1].samples[0].output_token_ids == [99]


async def die_mid_stream(call: GenerateCall) -> None:
    await call.relay.commit(await call.reserve())
    await call.tokens(0, ANSWER[:2])
    await call.fail(STATUS.UNAVAILABLE)


async def abort_mid_stream(call: GenerateCall) -> None:
    await call.relay.commit(await call.reserve())
    await call.tokens(0, ANSWER[:2])
    await call.fail(STATUS.ABORTED)


async def hang_mid_stream(call: GenerateCall) -> None:
    await call.relay.commit(await call.reserve())
    await call.tokens(0, ANSWER[:2])
    await call.hang()


@pytest.mark.parametrize("fault", [die_mid_stream, abort_mid_stream, hang_mid_stream])
@pytest.mark.parametrize("num_decodes", [1, 2])
async def test_a_failed_decode_leg_is_resumed(
    start_bench: StartBench, fault: Callable[[GenerateCall], None], num_decodes: int
) -> None:
    async with start_bench(num_decodes=num_decodes) as bench:
        bench.cluster.decodes[0].scripts.append(fault)  # type: ignore[arg-type]
        client = await bench.run()

        assert client.token_ids == list(ANSWER)
        resumed = bench.cluster.decodes[num_decodes - 1].requests[-1]
        assert resumed.samples[0].output_token_ids == list(ANSWER[:2])
        resumed_leg = bench.cluster.prefills[0].requests[-1]
        assert resumed_leg.samples[0].output_token_ids == list(ANSWER[:2])


async def test_a_killed_decode_worker(start_bench: StartBench) -> None:
    async with start_bench(num_decodes=2) as bench:
        first, second = bench.cluster.decodes
        first.scripts.append(hang_mid_stream)
        client = Client()
        async with until_tokens(bench, client, 2):
            await first.kill()
        assert client.token_ids == list(ANSWER)
        assert len(second.requests) == 1
        assert not bench.workers.decodes[0].is_ready


async def test_a_decode_worker_that_comes_back(start_bench: StartBench) -> None:
    async with start_bench(ready_wait_s=3.0) as bench:
        (worker,) = bench.cluster.decodes
        worker.scripts.append(hang_mid_stream)
        client = Client()
        async with until_tokens(bench, client, 2):
            await worker.kill()
            await worker.start()
        assert client.token_ids == list(ANSWER)


@asynccontextmanager
async def until_tokens(bench: Bench, client: Client, count: int) -> AsyncIterator[None]:
    """Runs a prompt; the body is run when that many tokens are there."""
    running = asyncio.create_task(bench.dispatcher.run(make_prompt(), client.take))
    await until(lambda: len(client.token_ids) >= count)
    yield
    await running


async def refuse(call: GenerateCall) -> None:
    await call.fail(STATUS.INVALID_ARGUMENT, "the prompt needs 9 blocks of 8")


async def refuse_prefill(call: PrefillCall) -> None:
    await call.fail(STATUS.INVALID_ARGUMENT, "the prompt needs 9 blocks of 8")


async def test_an_invalid_request_is_not_tried_again(start_bench: StartBench) -> None:
    async with start_bench(num_decodes=2, num_prefills=2) as bench:
        bench.cluster.decodes[0].scripts.append(refuse)
        with pytest.raises(BadRequest, match="9 blocks of 8"):
            await bench.run()
        for worker in bench.cluster.prefills:
            worker.scripts.append(refuse_prefill)
        with pytest.raises(BadRequest, match="9 blocks of 8"):
            await bench.run()
        assert sum(len(worker.requests) for worker in bench.cluster.decodes) == 2


async def test_an_exhausted_worker_is_passed_over(start_bench: StartBench) -> None:
    async with start_bench(num_decodes=2) as bench:

        async def exhausted(call: GenerateCall) -> None:
            await call.fail(STATUS.RESOURCE_EXHAUSTED)

        bench.cluster.decodes[0].scripts.append(exhausted)
        client = await bench.run()
        assert client.token_ids == list(ANSWER)
        assert bench.retries("decode", "resource_exhausted") == 1
        assert bench.workers.decodes[0].is_ready


async def test_a_draining_worker_gets_nothing(start_bench: StartBench) -> None:
    async with start_bench(num_decodes=2) as bench:
        bench.cluster.decodes[0].status.draining = True
        await until(lambda: not bench.workers.decodes[0].is_ready)
        await bench.run()
        assert bench.cluster.decodes[0].requests == []


async def test_attempts_are_bounded(start_bench: StartBench) -> None:
    async with start_bench(max_attempts=3) as bench:
        bench.cluster.decodes[0].scripts.extend([abort_mid_stream] * 9)
        with pytest.raises(WorkersFailed, match="All 3 attempts"):
            await bench.run()
        assert len(bench.cluster.decodes[0].requests) == 3


async def test_nobody_there(start_bench: StartBench) -> None:
    async with start_bench() as bench:
        for worker in bench.cluster.workers:
            await worker.kill()
        await until(lambda: not any(worker.is_ready for worker in bench.workers.decodes))
        with pytest.raises(NoWorkerReady) as refusal:
            await bench.run()
        assert refusal.value.headers["Retry-After"]


async def test_a_request_has_a_deadline(start_bench: StartBench) -> None:
    async with start_bench(request_timeout_s=0.3) as bench:

        async def slow(call: GenerateCall) -> None:
            await call.reserve()
            await call.hang()

        bench.cluster.decodes[0].scripts.append(slow)
        with pytest.raises(RequestTimedOut):
            await bench.run()


async def test_heartbeats_keep_a_slow_stream(start_bench: StartBench) -> None:
    async with start_bench(inactivity_s=0.2) as bench:

        async def slow(call: GenerateCall) -> None:
                    for _ in range(4):
                await call.heartbeat()
                await asyncio.sleep(0.1)
            await call.run_happily()

        bench.cluster.decodes[0].scripts.append(slow)
        await bench.run()
        assert len(bench.cluster.decodes[0].requests) == 1


async def test_a_lost_finish_needs_no_other_attempt(start_bench: StartBench) -> None:
    async with start_bench() as bench:

        async def no_finish(call: GenerateCall) -> None:
            await call.tokens(0, ANSWER[:3])
            await call.fail(STATUS.UNAVAILABLE)

        bench.cluster.decodes[0].scripts.append(no_finish)
        client = await bench.run(make_prompt(max_tokens=3))
        assert client.token_ids == list(ANSWER[:3])
        assert client.finish_reason is FinishReason.LENGTH


async def test_workers_are_used_in_turn(start_bench: StartBench) -> None:
    async with start_bench(num_prefills=2, num_decodes=2) as bench:
        for _ in range(4):
            await bench.run()
        assert [len(worker.requests) for worker in bench.cluster.workers] == [2, 2, 2, 2]


async def test_a_pair_must_agree_on_what_kv_means(start_bench: StartBench) -> None:
    async with start_bench(num_prefills=2) as bench:
        stranger = bench.cluster.prefills[0]
        stranger.status.fingerprint = b"g" * 32
        await until(lambda: bench.workers.prefills[0].fingerprint == b"g" * 32)
        for _ in range(3):
            await bench.run()
        assert stranger.requests == []


async def test_a_worker_of_the_wrong_role_is_never_ready(start_bench: StartBench) -> None:
    async with start_bench() as bench:
        bench.cluster.decodes[0].status.role = pb.ROLE_PREFILL
        await until(lambda: not bench.workers.decodes[0].is_ready)
        assert not bench.dispatcher.is_ready


async def test_stop_ends_what_runs_and_what_comes(start_bench: StartBench) -> None:
    async with start_bench() as bench:
        bench.cluster.decodes[0].scripts.append(hang_mid_stream)
        client = Client()
        with pytest.raises(ApiError, match="shutting down"):
            async with until_tokens(bench, client, 2):
                bench.dispatcher.stop()
        with pytest.raises(ApiError, match="shutting down"):
            await bench.run()
