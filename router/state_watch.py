"""Follows one worker: its pushed state, and a probe beside it.

1. A few probes (`Status`): calls get through, and how the worker's clock relates to ours.
2. `Watch`, from the change of the prefix cache up to which we know it; another process, or one that
   does not remember so far, answers with all that there is.
3. Every state is taken as it comes. A change was missed: the stream is opened again, knowing
   nothing. Silence, an error or a failed probe ends it.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Protocol

import grpc

from protos import serving_pb2 as pb
from protos import serving_pb2_grpc as pb_grpc
from router.clock import WorkerClock
from router.prefix_index import PrefixIndex
from router.tasks import cancel_and_wait

PROBE_INTERVAL_S = 5.0
_LATE_S = 0.1
NUM_FIRST_PROBES = 3
"""The first one's round trip has the connecting in it."""


class Followed(Protocol):
    """A worker that tells its state."""

    stub: "pb_grpc.DecodeAsyncStub | pb_grpc.PrefillAsyncStub"
    index: PrefixIndex
    clock: WorkerClock

    def take(self, state: pb.WorkerState, max_idle_s: float) -> bool: ...


async def follow(
    worker: Followed, timeout_s: float, max_idle_s: float, on_change: Callable[[], None]
) -> str:
    """Until something goes wrong; says what. Empty: it is to be followed again at once."""
    try:
        for _ in range(NUM_FIRST_PROBES):
            status = await _probe(worker, timeout_s)
        known = worker.index
        if known.generation != status.generation:
            known.clear()
        request = pb.WatchRequest(generation=known.generation, next_change=known.next_change)
        reading = asyncio.create_task(_read(worker, request, timeout_s, max_idle_s, on_change))
        probing = asyncio.create_task(_keep_probing(worker, timeout_s))
        try:
            await asyncio.wait({reading, probing}, return_when=asyncio.FIRST_COMPLETED)
            return (reading if reading.done() else probing).result()
        finally:
            await cancel_and_wait(reading, probing)
    except grpc.aio.AioRpcError as error:
        return error.code().name.lower()


async def _probe(worker: Followed, timeout_s: float) -> pb.WorkerStatus:
    asked_ns = time.monotonic_ns()
    status: pb.WorkerStatus = await worker.stub.Status(pb.StatusRequest(), timeout=timeout_s)
    worker.clock.of_process(status.generation)
    worker.clock.note(asked_ns, time.monotonic_ns(), status.monotonic_ns)
    return status


async def _keep_probing(worker: Followed, timeout_s: float) -> str:
    while True:
        await asyncio.sleep(PROBE_INTERVAL_S)
        await _probe(worker, timeout_s)


async def _read(
    worker: Followed,
    request: pb.WatchRequest,
    timeout_s: float,
    max_idle_s: float,
    on_change: Callable[[], None],
) -> str:
    call = worker.stub.Watch(request)
    try:
        while True:
            state = await _next(call, timeout_s)
            if not isinstance(state, pb.WorkerState):
                return "its state has ended"
            has_all = worker.take(state, max_idle_s)
            on_change()
            if not has_all:
                return ""
    except TimeoutError:
        return f"silent for {timeout_s:g} s"
    finally:
        call.cancel()


async def _next(
    call: "grpc.aio.UnaryStreamCall[pb.WatchRequest, pb.WorkerState]", timeout_s: float
) -> object:
    """What it says next. Raises TimeoutError if it is silent; that this loop was busy, and has not
    read what is there, is not its silence."""
    reading = asyncio.ensure_future(call.read())
    try:
        while True:
            began_s = time.monotonic()
            if (await asyncio.wait({reading}, timeout=timeout_s))[0]:
                return reading.result()
            if time.monotonic() - began_s < timeout_s + _LATE_S:
                raise TimeoutError
    finally:
        reading.cancel()
