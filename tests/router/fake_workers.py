"""Workers that speak the control plane over real gRPC and do what a test says.

Each answers every prompt with the tokens of `Relay.answer`. A test changes the course of things by
appending a script to `worker.scripts`: the next call runs it instead of the happy one. `Relay` is
what stands in for the fabric between them.
"""

import asyncio
import itertools
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import grpc

from protos import serving_pb2 as pb
from protos import serving_pb2_grpc as pb_grpc
from tests.router.fake_calls import FINGERPRINT as FINGERPRINT
from tests.router.fake_calls import GenerateCall as GenerateCall
from tests.router.fake_calls import PrefillCall as PrefillCall
from tests.router.fake_relay import Relay

MAX_MODEL_LEN = 100

Request = TypeVar("Request")
CallT = TypeVar("CallT")

WatchContext = grpc.aio.ServicerContext[pb.WatchRequest, pb.WorkerState]


@dataclass
class FakeWorker(ABC, Generic[Request, CallT]):
    relay: Relay
    name: str
    role: pb.Role.ValueType
    status: pb.WorkerStatus = field(default_factory=pb.WorkerStatus)
    scripts: deque[Callable[[CallT], Awaitable[None]]] = field(default_factory=deque)
    """For the next calls, one each."""
    requests: list[Request] = field(default_factory=list)
    """All calls so far."""
    address: str = "127.0.0.1:0"
    server: grpc.aio.Server | None = None
    ledger: pb.WorkerLedger = field(default_factory=pb.WorkerLedger)
    clock_offset_ns: int = 0
    """Its monotonic clock is so far ahead of ours."""
    steps: pb.StepTimes = field(default_factory=pb.StepTimes)
    idle_ms: int = 0
    caches: deque[pb.CacheChanges] = field(default_factory=deque)
    """For the next states, one each."""
    snapshot: pb.CacheChanges | None = None
    """What a stream that begins with nothing hears first."""
    is_silent: bool = False
    """Of its state."""
    watch_requests: list[pb.WatchRequest] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.status = pb.WorkerStatus(
            name=self.name,
            role=self.role,
            fingerprint=FINGERPRINT,
            max_model_len=MAX_MODEL_LEN,
        )

    async def start(self) -> None:
        self.server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        self._add(self.server)
        port = self.server.add_insecure_port(self.address)
        self.address = f"127.0.0.1:{port}"
        await self.server.start()

    async def kill(self) -> None:
        """Every call breaks off; the port is closed."""
        if self.server is not None:
            server, self.server = self.server, None
            await server.stop(None)

    @abstractmethod
    def _add(self, server: grpc.aio.Server) -> None:
        """Mounts the service."""

    async def Status(self, request: pb.StatusRequest, context: object) -> pb.WorkerStatus:
        self.status.monotonic_ns = self.now_ns()
        return self.status

    async def watch(self, request: pb.WatchRequest, context: WatchContext) -> None:
        """Twenty times a second, whatever the test has made of it."""
        self.watch_requests.append(request)
        first = self.snapshot if not request.next_change else None
        while True:
            self.status.monotonic_ns = self.now_ns()
            if self.is_silent:
                await asyncio.sleep(0.05)
                continue
            cache, first = first or (self.caches.popleft() if self.caches else None), None
            await context.write(
                pb.WorkerState(
                    status=self.status, steps=self.steps, cache=cache, idle_ms=self.idle_ms
                )
            )
            await asyncio.sleep(0.05)

    async def Ledger(self, request: pb.LedgerRequest, context: object) -> pb.WorkerLedger:
        return self.ledger

    def now_ns(self) -> int:
        return time.monotonic_ns() + self.clock_offset_ns

    async def _run(
        self, request: Request, call: CallT, happily: Callable[[], Awaitable[None]]
    ) -> None:
        self.requests.append(request)
        self.relay.num_open_calls += 1
        try:
            if self.scripts:
                await self.scripts.popleft()(call)
            else:
                await happily()
        finally:
            self.relay.num_open_calls -= 1


class FakeDecode(FakeWorker[pb.GenerateRequest, GenerateCall], pb_grpc.DecodeServicer):
    def __init__(self, relay: Relay, name: str = "decode-0") -> None:
        super().__init__(relay, name, pb.ROLE_DECODE)
        self.renewals: asyncio.Queue[bytes] = asyncio.Queue()
        self.local_rests: list[pb.RenewRequest] = []
        self.finishes: list[pb.FinishRequest] = []

    def _add(self, server: grpc.aio.Server) -> None:
        pb_grpc.add_DecodeServicer_to_server(self, server)

    async def Watch(  # type: ignore[override]
        self, request: pb.WatchRequest, context: WatchContext
    ) -> None:
        await self.watch(request, context)

    async def Generate(  # type: ignore[override]
        self,
        request: pb.GenerateRequest,
        context: grpc.aio.ServicerContext[pb.GenerateRequest, pb.GenerateEvent],
    ) -> None:
        call = GenerateCall(self.relay, request, context)
        call.renewals = self.renewals
        await self._run(request, call, call.run_happily)

    async def Renew(self, request: pb.RenewRequest, context: object) -> pb.RenewReply:
        if request.local_prefill_reason:  # it computes the rest, and goes on
            self.local_rests.append(request)
            self.relay.commit(request.transfer_id).set_result([])
        else:
            self.renewals.put_nowait(request.transfer_id)
        return pb.RenewReply()

    async def Finish(self, request: pb.FinishRequest, context: object) -> pb.FinishReply:
        self.finishes.append(request)
        return pb.FinishReply()


class FakePrefill(FakeWorker[pb.PrefillRequest, PrefillCall], pb_grpc.PrefillServicer):
    def __init__(self, relay: Relay, name: str = "prefill-0") -> None:
        super().__init__(relay, name, pb.ROLE_PREFILL)

    def _add(self, server: grpc.aio.Server) -> None:
        pb_grpc.add_PrefillServicer_to_server(self, server)

    async def Watch(  # type: ignore[override]
        self, request: pb.WatchRequest, context: WatchContext
    ) -> None:
        await self.watch(request, context)

    async def Prefill(  # type: ignore[override]
        self,
        request: pb.PrefillRequest,
        context: grpc.aio.ServicerContext[pb.PrefillRequest, pb.PrefillEvent],
    ) -> None:
        call = PrefillCall(self.relay, request, context)
        await self._run(request, call, call.run_happily)


@dataclass
class FakeCluster:
    relay: Relay
    prefills: list[FakePrefill]
    decodes: list[FakeDecode]

    @property
    def workers(self) -> Sequence[FakePrefill | FakeDecode]:
        return [*self.prefills, *self.decodes]


@asynccontextmanager
async def fake_cluster(
    answer: Sequence[int], *, num_prefills: int = 1, num_decodes: int = 1
) -> AsyncIterator[FakeCluster]:
    relay = Relay(answer)
    cluster = FakeCluster(
        relay,
        [FakePrefill(relay, f"prefill-{index}") for index in range(num_prefills)],
        [FakeDecode(relay, f"decode-{index}") for index in range(num_decodes)],
    )
    for worker in cluster.workers:
        await worker.start()
    try:
        yield cluster
    finally:
        for worker in cluster.workers:
            await worker.kill()


async def until(condition: Callable[[], bool], timeout_s: float = 3.0) -> None:
    """Waits for what a test cannot be told otherwise."""
    async with asyncio.timeout(timeout_s):
        for _ in itertools.count():
            if condition():
                return
            await asyncio.sleep(0.005)
