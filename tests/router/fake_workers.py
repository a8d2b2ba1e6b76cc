"""Workers that speak the control plane over real gRPC and do what a test says.

Each answers every prompt with the tokens of `Relay.answer`. A test changes the course of things by
appending a script to `worker.scripts`: the next call runs it instead of the happy one. `Relay` is
what stands in for the fabric between them.
"""

import asyncio
import itertools
import secrets
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import grpc

from protos import serving_pb2 as pb
from protos import serving_pb2_grpc as pb_grpc
from tests.router.fake_logprobs import logprobs_of, prompt_logprobs_of
from tests.router.fake_relay import Relay

FINGERPRINT = b"f" * 32
MAX_MODEL_LEN = 100

Request = TypeVar("Request")
CallT = TypeVar("CallT")
T = TypeVar("T")


class Call(Generic[Request]):
    """One call, as a script sees it."""

    def __init__(self, relay: Relay, request: Request, context: grpc.aio.ServicerContext) -> None:  # type: ignore[type-arg]
        self.relay = relay
        self.request = request
        self.context = context

    async def fail(self, code: grpc.StatusCode, text: str = "so says the test") -> None:
        await self.context.abort(code, text)

    async def hang(self) -> None:
        await asyncio.Event().wait()


class GenerateCall(Call[pb.GenerateRequest]):
    renewals: asyncio.Queue[bytes]

    async def heartbeat(self) -> None:
        await self.context.write(pb.GenerateEvent(heartbeat=pb.Heartbeat()))

    async def beating(self, coming: Coroutine[Any, Any, T]) -> T:
        """What comes, with heartbeats until it does."""
        task = asyncio.create_task(coming)
        while not (await asyncio.wait({task}, timeout=0.05))[0]:
            await self.heartbeat()
        return task.result()

    async def reserve(self, *, replaces_lost: bool = False) -> bytes:
        transfer_id = secrets.token_bytes(16)
        ticket = pb.KVTicket(
            transfer_id=transfer_id,
            shards=[pb.KVShard(address="ucx://nowhere:1", num_heads=1)],
            fingerprint=FINGERPRINT,
            num_tokens=len(self.request.prompt_token_ids),
            block_size=16,
            replaces_lost=replaces_lost,
        )
        await self.context.write(pb.GenerateEvent(reserved=ticket))
        return transfer_id

    async def tokens(
        self, first_index: int, token_ids: Sequence[int], hit: int = 0, sample: int = 0
    ) -> None:
        tokens = pb.Tokens(
            sample=sample,
            first_index=first_index,
            token_ids=token_ids,
            num_cached_tokens=hit,
            logprobs=logprobs_of(token_ids, self.request.sampling.num_logprobs),
        )
        await self.context.write(pb.GenerateEvent(tokens=tokens))

    async def finish(
        self, reason: pb.FinishReason.ValueType = pb.FINISH_REASON_STOP, sample: int = 0
    ) -> None:
        finished = pb.Finished(sample=sample, reason=reason)
        await self.context.write(pb.GenerateEvent(finished=finished))

    @property
    def num_delivered(self) -> int:
        return len(self.request.samples[0].output_token_ids)

    async def say_rest(self, start: int, hit: int = 0, sample: int = 0) -> None:
        """Tokens [start, …) of the answer, one by one, and the end."""
        answer = self.relay.answer_of(sample)
        end = min(len(answer), self.request.sampling.max_tokens)
        for index in range(start, end):
            await self.tokens(index, [answer[index]], 0 if index else hit, sample)
        is_whole = end == len(answer)
        await self.finish(pb.FINISH_REASON_STOP if is_whole else pb.FINISH_REASON_LENGTH, sample)

    async def prompt_logprobs(self) -> None:
        for told in prompt_logprobs_of(self.request):
            await self.context.write(pb.GenerateEvent(prompt_logprobs=told))

    async def run_happily(self) -> None:
        hit = self.relay.decode_hit
        if self.request.local_prefill:
            await self.prompt_logprobs()
        else:
            transfer_id = await self.reserve()
            await self.relay.commit(transfer_id)
            hit = max(hit, self.relay.prefill_hit)  # as COMMIT says: `FirstToken` may come later
        for sample, known in enumerate(self.request.samples):
            if not known.is_finished:
                await self.say_rest(len(known.output_token_ids), hit, sample)


class PrefillCall(Call[pb.PrefillRequest]):
    async def heartbeat(self) -> None:
        await self.context.write(pb.PrefillEvent(heartbeat=pb.Heartbeat()))

    async def first_token(
        self,
        token_id: int | None = None,
        reason: pb.FinishReason.ValueType = pb.FINISH_REASON_UNSPECIFIED,
        sample: int = 0,
    ) -> None:
        if token_id is None:
            token_id = self.relay.answer_of(sample)[0]
        hit = self.relay.prefill_hit
        first = pb.FirstToken(
            sample=sample, token_id=token_id, finish_reason=reason, num_cached_tokens=hit
        )
        for entry in logprobs_of([token_id], self.request.sampling.num_logprobs):
            first.logprobs.CopyFrom(entry)
        await self.context.write(pb.PrefillEvent(first_token=first))

    async def ship(self) -> None:
        commit = self.relay.commit(self.request.ticket.transfer_id)
        if not commit.done():
            commit.set_result(list(self.relay.answer[:1]))
        await self.context.write(pb.PrefillEvent(shipped=pb.Shipped()))

    async def prompt_logprobs(self) -> None:
        for told in prompt_logprobs_of(self.request):
            await self.context.write(pb.PrefillEvent(prompt_logprobs=told))

    async def run_happily(self) -> None:
        await self.prompt_logprobs()
        known = self.request.samples
        wanted = [index for index, sample in enumerate(known) if not sample.is_finished]
        if self.request.sampling.max_tokens == 1:
            for sample in wanted:
                await self.first_token(reason=pb.FINISH_REASON_LENGTH, sample=sample)
            return
        if not any(sample.output_token_ids for sample in known):
            for sample in wanted:
                await self.first_token(sample=sample)
        await self.ship()


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
        return self.status

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

    def _add(self, server: grpc.aio.Server) -> None:
        pb_grpc.add_DecodeServicer_to_server(self, server)

    async def Generate(  # type: ignore[override]
        self,
        request: pb.GenerateRequest,
        context: grpc.aio.ServicerContext[pb.GenerateRequest, pb.GenerateEvent],
    ) -> None:
        call = GenerateCall(self.relay, request, context)
        call.renewals = self.renewals
        await self._run(request, call, call.run_happily)

    async def Renew(self, request: pb.RenewRequest, context: object) -> pb.RenewReply:
        self.renewals.put_nowait(request.transfer_id)
        return pb.RenewReply()


class FakePrefill(FakeWorker[pb.PrefillRequest, PrefillCall], pb_grpc.PrefillServicer):
    def __init__(self, relay: Relay, name: str = "prefill-0") -> None:
        super().__init__(relay, name, pb.ROLE_PREFILL)

    def _add(self, server: grpc.aio.Server) -> None:
        pb_grpc.add_PrefillServicer_to_server(self, server)

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
