"""A relay of fake workers whose times are known, each by a clock of its own."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from protos import serving_pb2 as pb
from router.workers import Worker
from tests.router.conftest import RunningRouter, StartRouter
from tests.router.fake_workers import (
    FakeCluster,
    FakeDecode,
    FakePrefill,
    GenerateCall,
    PrefillCall,
    fake_cluster,
    until,
)

MS = 1_000_000
AHEAD_NS = 60_000_000_000  # clocks of other hosts have other origins; ours is young at a boot


@asynccontextmanager
async def hosts_apart(
    answer: Sequence[int], start_router: StartRouter, num_prefills: int
) -> AsyncIterator[tuple[FakeCluster, RunningRouter]]:
    """Each kind of worker has a clock of its own."""
    async with fake_cluster(answer, num_prefills=num_prefills) as cluster:
        for prefill in cluster.prefills:
            prefill.clock_offset_ns = AHEAD_NS
        cluster.decodes[0].clock_offset_ns = -AHEAD_NS
        async with start_router(cluster) as router:
            workers = router.router.workers
            everyone = (*workers.prefills, *workers.decodes)
            await until(lambda: all(map(knows_clock, everyone)), timeout_s=20)
            yield cluster, router


def knows_clock(worker: Worker) -> bool:
    """Well enough; the first status of all waits for a connection."""
    reading = worker.clock.at(time.monotonic_ns())
    return worker.is_ready and reading is not None and reading.error_ns < 2 * MS


def relay_timed(cluster: FakeCluster) -> None:
    """The next request's workers tell times: 2 ms of queue and 8 of building on prefill, 5 of
    shipping; decode attaches 6 ms after the build, and says that it has computed a tail itself."""
    prefill, decode = cluster.prefills[0], cluster.decodes[0]
    built = asyncio.get_running_loop().create_future()
    prefill.scripts.append(lambda call: ship_timed(prefill, call, built))
    decode.scripts.append(lambda call: attach_timed(decode, call, built))


async def ship_timed(prefill: FakePrefill, call: PrefillCall, built: asyncio.Future[int]) -> None:
    await asyncio.sleep(0.02)
    now = prefill.now_ns() - MS
    built.set_result(now - AHEAD_NS)
    timings = pb.Timings(
        queue_ns=2 * MS, queue=span(now - 10 * MS, now - 8 * MS),
        build_ns=8 * MS, build=span(now - 8 * MS, now),
        chunks=[pb.Chunk(num_computed_tokens=2, begin_ns=now - 8 * MS, end_ns=now)],
    )  # fmt: skip
    first = pb.FirstToken(token_id=call.relay.answer[0], timings=timings)
    await call.context.write(pb.PrefillEvent(first_token=first))
    timings.ship_ns, timings.kv_nbytes, timings.kv_frames = 5 * MS, 4096, 3
    timings.ship.CopyFrom(span(now - 2 * MS, now + 3 * MS))
    timings.codec, timings.offers = "raw", 1
    timings.transports.append("posix")
    for rank, ms in ((0, 1), (1, 5)):
        of_rank = span(now - 2 * MS, now + (ms - 2) * MS)
        timings.ranks.add(rank=rank, ship=of_rank, ship_ns=ms * MS, kv_nbytes=2048, kv_frames=2)
    await call.context.write(pb.PrefillEvent(shipped=pb.Shipped(timings=timings)))


async def attach_timed(decode: FakeDecode, call: GenerateCall, built: asyncio.Future[int]) -> None:
    await call.reserve()
    at = await built - AHEAD_NS
    timings = pb.Timings(
        queue_ns=MS, queue=span(at - 30 * MS, at - 29 * MS),
        install_ns=4 * MS, install=span(at - MS, at + 4 * MS),
        attach_ns=2 * MS, attach=span(at + 4 * MS, at + 6 * MS), kv_nbytes=4096, kv_frames=3,
        local_prefill_reason="cheaper_tail",
    )  # fmt: skip
    await asyncio.sleep(0.02)
    tokens = pb.Tokens(token_ids=call.relay.answer[:1], timings=timings)
    await call.context.write(pb.GenerateEvent(tokens=tokens))
    await call.say_rest(1)


def span(begin_ns: int, end_ns: int) -> pb.Span:
    return pb.Span(begin_ns=begin_ns, end_ns=end_ns)
