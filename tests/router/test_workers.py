"""Workers that join, leave, take other roles, and fail, under traffic."""

import asyncio
import time

import grpc
import pytest

from protos import serving_pb2 as pb
from protos import serving_pb2_grpc as pb_grpc
from router.errors import BadRequest
from router.worker import Worker
from runtime.grpc_client import open_channel
from tests.router.dispatch_bench import ANSWER, Client, StartBench, make_prompt, until_tokens
from tests.router.fake_both import join
from tests.router.fake_workers import (
    FakeDecode,
    GenerateCall,
    PrefillCall,
    fake_cluster,
    until,
)
from tests.router.test_decode_faults import refuse, refuse_prefill

STATUS = grpc.StatusCode


async def fail(call: GenerateCall | PrefillCall) -> None:
    await call.fail(STATUS.ABORTED)


async def test_twenty_bad_requests_open_no_breaker(start_bench: StartBench) -> None:
    async with start_bench(num_decodes=2) as bench:
        (prefill,) = bench.cluster.prefills
        for worker in bench.cluster.decodes:
            worker.scripts.extend([refuse] * 10)
        for _ in range(20):
            with pytest.raises(BadRequest):
                await bench.run()
        prefill.scripts.extend([refuse_prefill] * 20)
        for _ in range(20):
            with pytest.raises(BadRequest):
                await bench.run()
        assert all(worker.is_ready for worker in bench.workers.everyone)
        assert all(worker.breaker.state(1e12) == "closed" for worker in bench.workers.everyone)


async def test_a_worker_whose_calls_fail_is_left_alone_and_probed(start_bench: StartBench) -> None:
    async with start_bench(num_decodes=2, retry_reserve_per_s=100.0) as bench:
        bad, good = bench.cluster.decodes
        bad.scripts.extend([fail] * 1000)
        for _ in range(10):
            assert (await bench.run()).token_ids == list(ANSWER)
        seen = bench.workers.decodes[0]
        await until(lambda: not seen.is_ready)
        assert seen.problem == "its calls fail"
        labels = {"role": "decode"}
        assert bench.registry.get_sample_value("baton_breakers_open", labels) == 1
        assert len(bad.requests) == 5
        await until(lambda: len(bad.requests) == 6)
        assert bad.requests[-1].local_prefill_reason == "probe"
        assert not seen.is_ready, "the probe has failed"
        bad.scripts.clear()
        await until(lambda: seen.is_ready, 5)
        assert {call.local_prefill_reason for call in bad.requests[6:]} == {"probe"}
        while len(bad.requests) < 8:
            await bench.run()
        assert not any(call.request_id.startswith("probe") for call in good.requests)


async def test_the_breaker_covers_the_prefill_leg(start_bench: StartBench) -> None:
    async with start_bench(num_prefills=2, retry_reserve_per_s=100.0) as bench:
        bad, _ = bench.cluster.prefills
        bad.scripts.extend([fail] * 6)
        for _ in range(12):
            assert (await bench.run(make_prompt(1))).token_ids == list(ANSWER[:1])
        seen = bench.workers.prefills[0]
        await until(lambda: seen.problem == "its calls fail")
        assert len(bad.requests) == 5
        await until(lambda: len(bad.requests) == 6)
        assert bad.requests[-1].request_id.startswith("probe")


async def test_the_last_of_a_role_is_never_shut_out(start_bench: StartBench) -> None:
    async with start_bench(retry_reserve_per_s=100.0) as bench:
        (decode,) = bench.cluster.decodes
        decode.scripts.extend([fail] * 6)
        clients = await asyncio.gather(*(bench.run() for _ in range(6)))
        assert all(client.token_ids == list(ANSWER) for client in clients)
        (seen,) = bench.workers.decodes
        assert seen.breaker.state(time.monotonic()) != "closed"
        assert seen.is_ready


async def test_a_worker_joins(start_bench: StartBench) -> None:
    async with start_bench() as bench:
        newcomer = FakeDecode(bench.cluster.relay, "decode-1")
        await newcomer.start()
        bench.cluster.decodes.append(newcomer)
        bench.workers.add(newcomer.address, pb.ROLE_DECODE)
        bench.workers.add(newcomer.address, pb.ROLE_DECODE)
        assert len(bench.workers.everyone) == 3
        await until(lambda: bench.workers.decodes[1].is_ready)
        for _ in range(2):
            await bench.run()
        assert len(newcomer.requests) == 1


async def test_a_worker_leaves_and_its_stream_runs_to_the_end(start_bench: StartBench) -> None:
    async with start_bench(num_decodes=2, inactivity_s=5.0) as bench:
        first, second = bench.cluster.decodes
        go_on = asyncio.Event()

        async def slow(call: GenerateCall) -> None:
            await call.relay.commit(await call.reserve())
            await call.tokens(0, ANSWER[:2])
            await go_on.wait()
            await call.say_rest(2)

        first.scripts.append(slow)
        client = Client()
        async with until_tokens(bench, client, 2):
            bench.workers.remove(first.address)
            await bench.run()
            await bench.run()
            assert len(second.requests) == 2
            go_on.set()
        assert client.token_ids == list(ANSWER)
        assert len(first.requests) == 1
        assert [worker.address for worker in bench.workers.decodes] == [second.address]


async def test_a_worker_takes_another_role(start_bench: StartBench) -> None:
    """From decode to both, to prefill alone, and back."""
    async with start_bench() as bench:
        both = await join(bench.cluster)
        bench.workers.add(both.address, pb.ROLE_DECODE)
        await until(lambda: len(bench.workers.everyone) == 4)
        await until(lambda: all(worker.is_ready for worker in bench.workers.everyone))
        for _ in range(4):
            await bench.run()
        assert (len(both.requests), len(both.prefill.requests)) == (2, 2)
        both.serves(pb.ROLE_PREFILL)
        await until(lambda: len(bench.workers.decodes) == 1)
        for _ in range(2):
            await bench.run()
        assert (len(both.requests), len(both.prefill.requests)) == (2, 3)

        both.serves()
        await until(lambda: not bench.workers.prefills[1].is_ready)
        both.serves(pb.ROLE_DECODE)
        await until(lambda: len(bench.workers.decodes) == 2 and len(bench.workers.prefills) == 1)


async def test_a_worker_of_both_roles_does_not_ship_to_itself(start_bench: StartBench) -> None:
    """Alone it computes prompts where they are decoded."""
    async with start_bench(num_decodes=0, num_prefills=0) as bench:
        both = await join(bench.cluster)
        bench.workers.add(both.address, pb.ROLE_DECODE)
        await until(lambda: len(bench.workers.everyone) == 2)
        await until(lambda: all(worker.is_ready for worker in bench.workers.everyone))
        assert (await bench.run()).token_ids == list(ANSWER)
        assert both.requests[0].local_prefill_reason == "no_prefill_worker"
        assert both.prefill.requests == []


async def test_one_that_has_just_come_back_takes_other_roles() -> None:
    """Its channel looks only now and then whether anybody is there."""
    async with fake_cluster(()) as cluster:
        both = await join(cluster)
        async with open_channel(both.address) as channel:
            worker = Worker(both.address, channel)
            await both.kill()
            with pytest.raises(grpc.aio.AioRpcError):
                await pb_grpc.DutyStub(channel).Assign(pb.AssignRequest())  # it pauses from now on
            assigning = asyncio.create_task(worker.assign([pb.ROLE_DECODE], 0.0))
            await asyncio.sleep(0.2)
            await both.start()
            assert await asyncio.wait_for(assigning, 5.0) == 2  # as it says
            assert list(both.assignments[-1].roles) == [pb.ROLE_DECODE]
            await both.kill()
            with pytest.raises(grpc.aio.AioRpcError, match="UNAVAILABLE"):
                await asyncio.wait_for(worker.assign([], 0.0), 5.0)
