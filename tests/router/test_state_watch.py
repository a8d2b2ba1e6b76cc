"""Following workers: what is pushed, what was missed, and who falls silent."""

import asyncio
import time

from protos import serving_pb2 as pb
from router.workers import WorkerSet
from tests.router.dispatch_bench import StartBench
from tests.router.fake_workers import until


async def test_changes_of_the_cache_are_followed_over_a_gap(start_bench: StartBench) -> None:
    async with start_bench() as bench:
        fake, worker = bench.cluster.decodes[0], bench.workers.decodes[0]
        fake.status.generation, fake.status.num_blocks = 5, 9
        told = pb.CacheChanges(is_snapshot=True, next_change=2, stored=[1, 2])
        fake.caches.append(told)
        fake.caches.append(pb.CacheChanges(first_change=2, next_change=4, stored=[3], removed=[1]))
        await until(lambda: worker.index.next_change == 4)
        assert worker.index.num_cached([3, 2, 1]) == 2
        fake.caches.append(pb.CacheChanges(first_change=6, next_change=7, stored=[8]))
        await until(lambda: len(fake.watch_requests) == 2)
        assert fake.watch_requests[1] == pb.WatchRequest()  # it knows nothing any more
        assert len(worker.index) == 0
        assert worker.is_ready


async def test_a_stream_that_breaks_goes_on_where_it_was(start_bench: StartBench) -> None:
    async with start_bench() as bench:
        fake, worker = bench.cluster.prefills[0], bench.workers.prefills[0]
        fake.status.generation, fake.status.num_blocks = 5, 9
        fake.caches.append(pb.CacheChanges(is_snapshot=True, next_change=2, stored=[1, 2]))
        await until(lambda: len(worker.index) == 2)
        await fake.kill()
        await until(lambda: not worker.is_ready)
        await fake.start()
        await until(lambda: worker.is_ready)
        assert fake.watch_requests[-1] == pb.WatchRequest(generation=5, next_change=2)
        await fake.kill()
        fake.status.generation = 6  # another process
        await fake.start()
        await until(lambda: fake.watch_requests[-1] == pb.WatchRequest())
        assert len(worker.index) == 0


async def test_an_engine_that_hangs_takes_nothing_although_its_process_answers(
    start_bench: StartBench,
) -> None:
    async with start_bench(num_decodes=2, inactivity_s=0.4) as bench:
        bench.cluster.decodes[0].idle_ms = 11_000
        await until(lambda: not bench.workers.decodes[0].is_ready)
        await bench.run()
        assert bench.cluster.decodes[0].requests == []
        bench.cluster.decodes[0].idle_ms = 10
        await until(lambda: bench.workers.decodes[0].is_ready)


async def test_a_second_router_started_in_mid_load_agrees(start_bench: StartBench) -> None:
    async with start_bench(num_prefills=2, num_decodes=2) as bench:
        for index, fake in enumerate(bench.cluster.workers):
            fake.status.generation, fake.status.num_blocks = index + 1, 9
            fake.status.num_running = index
            snapshot = pb.CacheChanges(is_snapshot=True, next_change=1, stored=[index])
            fake.caches.append(snapshot)
        first = [*bench.workers.decodes, *bench.workers.prefills]
        await until(lambda: all(len(worker.index) == 1 for worker in first))
        for index, fake in enumerate(bench.cluster.workers):  # as a worker answers who knows less
            fake.caches.append(pb.CacheChanges(first_change=1, next_change=2, stored=[index + 4]))
        await until(lambda: all(len(worker.index) == 2 for worker in first))
        for index, fake in enumerate(bench.cluster.workers):
            stored = [index, index + 4]
            fake.snapshot = pb.CacheChanges(is_snapshot=True, next_change=2, stored=stored)
        second = WorkerSet(
            [fake.address for fake in bench.cluster.decodes],
            [fake.address for fake in bench.cluster.prefills],
            interval_s=0.05,
            timeout_s=0.5,
        )
        began = time.monotonic()
        second.start()
        try:
            others = [*second.decodes, *second.prefills]
            await until(lambda: all(len(worker.index) == 2 for worker in others), 2.0)
            assert time.monotonic() - began < 2.0
            for one, other in zip(first, others, strict=True):
                assert (one.name, one.load, one.index) == (other.name, other.load, other.index)
        finally:
            await second.close()
            for fake in bench.cluster.workers:
                fake.status.num_running = 0
            await until(lambda: not any(worker.load for worker in first))


async def test_a_busy_router_does_not_take_its_own_lateness_for_silence(
    start_bench: StartBench,
) -> None:
    async with start_bench() as bench:
        everyone = [*bench.workers.decodes, *bench.workers.prefills]
        time.sleep(0.8)  # noqa: ASYNC251 - longer than any silence that is allowed
        for _ in range(20):
            await asyncio.sleep(0)
            assert all(worker.is_ready for worker in everyone)
        await asyncio.sleep(0.1)
        assert all(worker.is_ready for worker in everyone)
