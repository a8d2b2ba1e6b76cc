"""Prefill queues that are full: no fault of anybody, no promise held meanwhile, 429 at the end."""

import asyncio
import json
import time

import grpc
import pytest

from router.errors import Overloaded
from router.queue_line import TRIES_A_ROUND, FullQueues, QueueLine
from router.record import unkept
from router.workers import WorkerSet
from runtime.call import RETRY_AFTER_MS
from tests.router.dispatch_bench import ANSWER, Bench, Client, StartBench, make_prompt
from tests.router.fake_workers import FakePrefill, PrefillCall, until


async def refuse(call: PrefillCall) -> None:
    call.context.set_trailing_metadata(((RETRY_AFTER_MS, "2500"),))
    await call.fail(grpc.StatusCode.RESOURCE_EXHAUSTED, "the prefill queue is full")


def fill(worker: FakePrefill, num_refusals: int) -> None:
    """Its status says so, and so many calls hear it."""
    worker.status.max_queue_ms, worker.status.queue_ms = 1000, 1500
    worker.scripts.extend([refuse] * num_refusals)


async def known_to_be_full(bench: Bench) -> None:
    await until(lambda: not any(worker.has_queue_room for worker in bench.workers.prefills))


@pytest.mark.parametrize("max_tokens", [50, 1])
async def test_another_worker_is_asked_at_once(start_bench: StartBench, max_tokens: int) -> None:
    async with start_bench(num_prefills=2) as bench:
        first, second = bench.cluster.prefills
        fill(first, 1)
        client = await bench.run(make_prompt(max_tokens))
        assert client.token_ids == list(ANSWER[:max_tokens])
        assert [len(p.requests) for p in (first, second)] == [1, 1]
        # The ticket was not used: the same one serves, and nobody was asked for another.
        assert first.requests[0].ticket == second.requests[0].ticket
        assert bench.cluster.decodes[0].renewals.empty()
        assert len(bench.cluster.decodes[0].requests) == (max_tokens > 1)
        assert bench.retries("prefill", "queue_full") == 1
        assert all(worker.is_ready for worker in bench.workers.prefills)
        # And it is asked again: it was not excluded.
        await bench.run()
        await bench.run()
        assert len(first.requests) >= 2


@pytest.mark.parametrize("max_tokens", [50, 1])
async def test_it_waits_without_a_promise_and_tries_again(
    start_bench: StartBench, max_tokens: int
) -> None:
    async with start_bench(num_prefills=2) as bench:
        for worker in bench.cluster.prefills:
            fill(worker, 1)
        await known_to_be_full(bench)
        client = Client()
        running = asyncio.create_task(bench.dispatcher.run(make_prompt(max_tokens), [client.take]))
        await until(lambda: bench.retries("prefill", "queue_full") == 2)
        await until(lambda: bench.cluster.relay.num_open_calls == 0)
        await asyncio.sleep(0.15)  # some statuses later it still waits, and holds nothing
        assert not running.done()
        assert bench.cluster.relay.num_open_calls == 0
        assert sum(len(p.requests) for p in bench.cluster.prefills) == 2

        bench.cluster.prefills[1].status.queue_ms = 900
        await running
        assert client.token_ids == list(ANSWER[:max_tokens])
        assert not any(call.local_prefill for call in bench.cluster.decodes[0].requests)


async def test_more_refusals_than_attempts_are_no_failure(start_bench: StartBench) -> None:
    async with start_bench(max_attempts=1) as bench:
        bench.cluster.prefills[0].scripts.extend([refuse] * 5)
        assert (await bench.run()).token_ids == list(ANSWER)
        assert len(bench.cluster.prefills[0].requests) == 6


@pytest.mark.parametrize("max_tokens", [50, 1])
async def test_at_the_end_it_is_429_with_retry_after(
    start_bench: StartBench, max_tokens: int
) -> None:
    async with start_bench(num_prefills=2, queue_wait_s=0.2) as bench:
        for worker in bench.cluster.prefills:
            fill(worker, 1)
        await known_to_be_full(bench)
        with pytest.raises(Overloaded, match=r"waited 0\.2 s") as caught:
            await bench.run(make_prompt(max_tokens))
        assert (caught.value.status, caught.value.headers) == (429, {"Retry-After": "3"})
        error = json.loads(caught.value.body())["error"]
        assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
        assert all(worker.is_ready for worker in bench.workers.prefills)


async def test_what_it_waited_for_its_turn_counts(start_bench: StartBench) -> None:
    async with start_bench(queue_wait_s=60.0) as bench:
        fill(bench.cluster.prefills[0], 1)
        await known_to_be_full(bench)
        prompt = make_prompt()
        record = unkept(prompt)
        record.waited(time.monotonic_ns() - 59_900_000_000)
        async with asyncio.timeout(10):
            with pytest.raises(Overloaded):
                await bench.dispatcher.run(prompt, [Client().take], record=record)


async def test_resource_exhausted_without_the_word_is_a_failed_leg(
    start_bench: StartBench,
) -> None:
    """As grpc itself says of a message that is too long."""

    async def exhausted(call: PrefillCall) -> None:
        await call.fail(grpc.StatusCode.RESOURCE_EXHAUSTED)

    async with start_bench() as bench:
        bench.cluster.prefills[0].scripts.append(exhausted)
        with_local = await bench.run()
        assert with_local.token_ids == list(ANSWER)
        assert bench.retries("prefill", "resource_exhausted") == 1


async def test_the_line_moves_a_few_a_round_in_order() -> None:
    workers = WorkerSet([], ["127.0.0.1:1"], interval_s=60, timeout_s=0.1)
    worker, full = workers.prefills[0], FullQueues()
    worker.is_ready = True
    line, tried = QueueLine(workers), list[int]()

    async def one(index: int) -> None:
        if await line.wait(full, lambda: [worker], timeout_s=5):
            tried.append(index)

    worker.num_refreshes = 1
    tasks = [asyncio.create_task(one(index)) for index in range(TRIES_A_ROUND + 3)]
    await asyncio.sleep(0.01)
    assert tried == list(range(TRIES_A_ROUND))
    worker.num_refreshes += 1
    changed, workers._changed = workers._changed, asyncio.Event()
    changed.set()
    await asyncio.gather(*tasks)
    assert tried == list(range(TRIES_A_ROUND + 3))
    await workers.close()
