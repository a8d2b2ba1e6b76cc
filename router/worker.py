"""One service of one worker process, as the router sees it: its channel, and what it said last.

Whether it is ready, and whether its calls go well, is decided here; who asks it, and when, in
router/workers.py.
"""

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import grpc

from protos import serving_pb2 as pb
from protos import serving_pb2_grpc as pb_grpc
from router.breaker import CircuitBreaker
from router.clock import WorkerClock
from router.event_stream import OpenStreams
from router.prefix_index import PrefixIndex
from runtime.grpc_client import open_channel
from runtime.log import get_logger
from runtime.tls import TLS

log = get_logger()

ASSIGN_TIMEOUT_S = 5.0
_RECONNECT_S = 1.5
"""Three of the pauses after which a channel tries again (runtime/grpc_client.py): it may not know
yet of a worker that has just come back."""
_RECONNECT_LOOK_S = 0.1


class Worker:
    """One service of one worker process, as the router sees it (a policy `Candidate`)."""

    role: pb.Role.ValueType
    stub: "pb_grpc.DecodeAsyncStub | pb_grpc.PrefillAsyncStub"

    def __init__(self, address: str, channel: grpc.aio.Channel) -> None:
        self.address = address
        self.status = pb.WorkerStatus()
        self.steps = pb.StepTimes()
        self.index = PrefixIndex()
        """What it has cached."""
        self.is_ready = False
        self.num_picks = 0
        self.num_refreshes = 0
        """States received; says whether one came after a given moment."""
        self.clock = WorkerClock()
        self.breaker = CircuitBreaker()
        self.streams = OpenStreams()
        self.is_last_resort = False
        """Nobody else of its role is ready: it takes calls though they may fail."""
        self.problem = "not heard of yet"
        """Why it is not ready; empty: it is."""
        self._channel = channel
        self._idle = asyncio.Event()
        self._num_in_flight = 0
        self._num_in_flight_at_refresh = 0
        self._taken_s = 0.0

    @property
    def name(self) -> str:
        return self.status.name or self.address

    @property
    def fingerprint(self) -> bytes:
        return self.status.fingerprint

    @property
    def load(self) -> int:
        """Requests there: what it reported, corrected by what this router has done since."""
        status = self.status
        reported = status.num_waiting + status.num_running + status.num_awaiting_kv
        since = self._num_in_flight - self._num_in_flight_at_refresh
        return max(self._num_in_flight, reported + since)

    @property
    def has_queue_room(self) -> bool:
        """By its last status, a prompt that came now would not wait too long there."""
        max_queue_ms = self.status.max_queue_ms
        return not max_queue_ms or self.status.queue_ms <= max_queue_ms

    @property
    def queue_s(self) -> float:
        """What is to be computed there, of whomever: what it told, less the time since."""
        return max(0.0, self.status.queue_ms / 1000 - (time.monotonic() - self._taken_s))

    @property
    def is_on_duty(self) -> bool:
        """As far as is known, it serves the role, if perhaps not just now."""
        serves = self.status.serves
        return not serves or self.role in serves

    @contextmanager
    def in_flight(self, num_samples: int = 1) -> Iterator[None]:
        """Held for the life of a call, which makes so many sequences run."""
        self.num_picks += 1
        self._num_in_flight += num_samples
        try:
            yield
            self.breaker.succeeded(time.monotonic())
        finally:
            self._num_in_flight -= num_samples
            if not self._num_in_flight:
                self._idle.set()

    def take(self, state: pb.WorkerState, max_idle_s: float) -> bool:
        """It says how it is. False: changes of its cache were missed, and its index is void."""
        self.status, self.steps = state.status, state.steps
        self._taken_s = time.monotonic()
        self.num_refreshes += 1
        self._num_in_flight_at_refresh = self._num_in_flight
        problem = self.why_not(state.status)
        if not problem and state.idle_ms > max_idle_s * 1000:
            problem = f"its engine has not turned for {state.idle_ms} ms"
        self.set_ready(not problem, problem)
        limit = state.status.num_blocks
        return not state.HasField("cache") or self.index.apply(
            state.status.generation, state.cache, limit
        )

    def why_not(self, status: pb.WorkerStatus) -> str:
        """Why a worker that says this of itself takes no requests; empty: it does."""
        if status.role != self.role:
            return f"its role is {pb.Role.Name(status.role)}"
        if status.draining:
            return "draining"
        return "" if self.role in (status.serves or [self.role]) else "it serves another role"

    def set_ready(self, is_ready: bool, problem: str = "") -> None:
        if is_ready and not self.is_last_resort:
            is_shut = self.breaker.state(time.monotonic()) != "closed"
            is_ready, problem = not is_shut, "its calls fail" if is_shut else problem
        if is_ready != self.is_ready:
            say = log.info if is_ready else log.warning
            said = {"worker": self.name, "role": pb.Role.Name(self.role), "ready": is_ready}
            say("worker changed", address=self.address, problem=problem, **said)
        self.is_ready, self.problem = is_ready, problem

    async def idle(self) -> None:
        """Until no call of ours is open."""
        while self._num_in_flight:
            self._idle.clear()
            await self._idle.wait()

    async def assign(self, roles: Sequence[pb.Role.ValueType], grace_s: float) -> int:
        """See `Duty.Assign`. Raises AioRpcError."""
        request = pb.AssignRequest(roles=roles, grace_ms=round(grace_s * 1000))
        stub: pb_grpc.DutyAsyncStub = pb_grpc.DutyStub(self._channel)
        give_up_at = time.monotonic() + _RECONNECT_S
        while True:
            try:
                reply: pb.AssignReply = await stub.Assign(request, timeout=ASSIGN_TIMEOUT_S)
            except grpc.aio.AioRpcError as error:
                is_back = error.code() is not grpc.StatusCode.UNAVAILABLE
                if is_back or time.monotonic() > give_up_at:
                    raise
                await asyncio.sleep(_RECONNECT_LOOK_S)
            else:
                return reply.num_leaving

    async def pin(self, request: pb.PinRequest) -> pb.PinReply:
        """See `Cache.Pin`. Raises AioRpcError."""
        stub: pb_grpc.CacheAsyncStub = pb_grpc.CacheStub(self._channel)
        reply: pb.PinReply = await stub.Pin(request, timeout=ASSIGN_TIMEOUT_S)
        return reply

    async def unpin(self, name: str) -> bool:
        """False: there was none. Raises AioRpcError."""
        stub: pb_grpc.CacheAsyncStub = pb_grpc.CacheStub(self._channel)
        reply: pb.UnpinReply = await stub.Unpin(
            pb.UnpinRequest(name=name), timeout=ASSIGN_TIMEOUT_S
        )
        return reply.was_there

    async def close(self) -> None:
        await self._channel.close()


class DecodeWorker(Worker):
    role = pb.ROLE_DECODE
    stub: "pb_grpc.DecodeAsyncStub"

    def __init__(self, address: str, tls: TLS | None = None) -> None:
        channel = open_channel(address, tls)
        super().__init__(address, channel)
        self.stub = pb_grpc.DecodeStub(channel)


class PrefillWorker(Worker):
    role = pb.ROLE_PREFILL
    stub: "pb_grpc.PrefillAsyncStub"

    def __init__(self, address: str, tls: TLS | None = None) -> None:
        channel = open_channel(address, tls)
        super().__init__(address, channel)
        self.stub = pb_grpc.PrefillStub(channel)
