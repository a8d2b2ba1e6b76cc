"""A decode leg that fails is resumed elsewhere with the tokens delivered so far."""

import asyncio
from collections.abc import Callable

import grpc
import pytest

from protos import serving_pb2 as pb
from router import event_stream
from router.errors import ApiError, BadRequest, NoRetryLeft, NoWorkerReady, WorkersFailed
from router.request import FinishReason
from runtime.call import DRAINING, RETRY_AFTER_MS
from tests.router.dispatch_bench import ANSWER, Client, StartBench, make_prompt, until_tokens
from tests.router.fake_workers import GenerateCall, PrefillCall, until

STATUS = grpc.StatusCode


async def die_mid_stream(call: GenerateCall) -> None:
    await call.relay.commit(await call.reserve())
    await call.tokens(0, ANSWER[:2])
    await call.fail(STATUS.UNAVAILABLE)


async def abort_mid_stream(call: GenerateCall) -> None:
    await call.relay.commit(await call.reserve())
    await call.tokens(0, ANSWER[:2])
    await call.fail(STATUS.ABORTED)


async def cancel_mid_stream(call: GenerateCall) -> None:
    """The status a stopping server may give: not to be mistaken for our own cancellation."""
    await call.relay.commit(await call.reserve())
    await call.tokens(0, ANSWER[:2])
    await call.fail(STATUS.CANCELLED)


async def hang_mid_stream(call: GenerateCall) -> None:
    await call.relay.commit(await call.reserve())
    await call.tokens(0, ANSWER[:2])
    await call.hang()


@pytest.mark.parametrize(
    "fault", [die_mid_stream, abort_mid_stream, cancel_mid_stream, hang_mid_stream]
)
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


async def test_stop_ends_what_runs_and_what_comes(start_bench: StartBench) -> None:
    async with start_bench() as bench:
        bench.cluster.decodes[0].scripts.append(hang_mid_stream)
        client = Client()
        with pytest.raises(ApiError, match="shutting down"):
            async with until_tokens(bench, client, 2):
                bench.dispatcher.stop()
        with pytest.raises(ApiError, match="shutting down"):
            await bench.run()


async def get_on(call: GenerateCall) -> None:
    """One token more, and the end of this worker."""
    if not call.request.local_prefill:
        await call.relay.commit(await call.reserve())
    await call.tokens(call.num_delivered, [ANSWER[call.num_delivered]])
    await call.fail(STATUS.UNAVAILABLE)


async def test_an_answer_outlives_more_workers_than_attempts(start_bench: StartBench) -> None:
    async with start_bench(max_attempts=2) as bench:
        bench.cluster.decodes[0].scripts.extend([get_on] * 3)
        client = await bench.run()
        assert client.token_ids == list(ANSWER)
        told = [call.samples[0].output_token_ids for call in bench.cluster.decodes[0].requests]
        assert told == [list(ANSWER[:count]) for count in range(4)]
        labels = {"reason": "unavailable"}
        assert bench.registry.get_sample_value("baton_migrations_total", labels) == 3


async def test_a_prompt_without_tokens_is_not_tried_beyond_the_budget(
    start_bench: StartBench,
) -> None:
    async def die(call: GenerateCall) -> None:
        await call.fail(STATUS.ABORTED)

    async with start_bench(retry_ratio=0.0, retry_reserve_per_s=0.1) as bench:
        bench.cluster.decodes[0].scripts.extend([die] * 2)
        with pytest.raises(NoRetryLeft) as refusal:
            await bench.run()
        assert (refusal.value.status, refusal.value.headers) == (503, {"Retry-After": "1"})
        bench.cluster.decodes[0].scripts.extend([get_on] * 3)
        assert (await bench.run()).token_ids == list(ANSWER), "its client has tokens"


async def test_a_full_queue_does_not_hold_up_who_has_tokens(start_bench: StartBench) -> None:
    async def full(call: PrefillCall) -> None:
        call.context.set_trailing_metadata(((RETRY_AFTER_MS, "2500"),))
        await call.fail(STATUS.RESOURCE_EXHAUSTED)

    async with start_bench() as bench:
        (decode,), (prefill,) = bench.cluster.decodes, bench.cluster.prefills

        async def die(call: GenerateCall) -> None:
            await call.relay.commit(await call.reserve())
            prefill.scripts.append(full)
            await call.tokens(0, ANSWER[:2])
            await call.fail(STATUS.UNAVAILABLE)

        decode.scripts.append(die)
        assert (await bench.run()).token_ids == list(ANSWER)
        first, relayed, alone = decode.requests
        told = [call.local_prefill_reason for call in (first, relayed, alone)]
        assert told == ["", "", "queue_full"]


async def test_a_worker_that_sends_its_streams_away_is_not_at_fault(
    start_bench: StartBench,
) -> None:
    """No retry of the budget is drawn, and others go elsewhere at once."""

    async def send_away(call: GenerateCall) -> None:
        decode.status.serves[:] = [pb.ROLE_PREFILL]
        await call.relay.commit(await call.reserve())
        await call.context.abort(STATUS.UNAVAILABLE, "it drains", ((DRAINING, "1"),))

    async with start_bench(num_decodes=2, retry_ratio=0.0, retry_reserve_per_s=0.0) as bench:
        decode, other = bench.cluster.decodes
        decode.scripts.append(send_away)
        assert (await bench.run()).token_ids == list(ANSWER)
        assert bench.retries("decode", "draining") == 1
        for _ in range(2):
            await bench.run()
        assert (len(decode.requests), len(other.requests)) == (1, 3)


async def test_silence_of_state_and_stream_is_noticed_before_the_deadline(
    start_bench: StartBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stream with heartbeats goes on meanwhile."""
    monkeypatch.setattr(event_stream, "MISSED_HEARTBEATS_S", 0.2)
    async with start_bench(num_decodes=2, inactivity_s=60.0) as bench:
        frozen, other = bench.cluster.decodes

        async def beat(call: GenerateCall) -> None:
            await call.relay.commit(await call.reserve())
            await call.beating(asyncio.sleep(1.0))
            await call.say_rest(0)

        frozen.scripts.extend([hang_mid_stream, beat])
        other.scripts.append(beat)
        async with asyncio.timeout(4):
            runs = [asyncio.create_task(bench.run()) for _ in range(3)]
            await until(lambda: len(frozen.requests) == 2)
            frozen.is_silent = True
            clients = await asyncio.gather(*runs)
        assert all(client.token_ids == list(ANSWER) for client in clients)
        assert bench.retries("decode", "silent") == 1
        frozen.is_silent = False
        await until(lambda: bench.workers.decodes[0].is_ready)
