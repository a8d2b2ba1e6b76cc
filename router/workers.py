"""The workers this router knows: one channel each, and what they said of themselves last.

1. `start` opens the channels and a task per worker, which follows its state
   (router/state_watch.py).
2. A worker is ready while its state comes in time, its engine turns, and it says that it
   serves the role.
3. `report` takes a failed call into account: a worker that may be gone counts as not ready until
   it tells its state again. `wait_for` sleeps until something has changed.
4. `close` ends the tasks and the channels; by then no call is open any more.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import grpc

from protos import serving_pb2 as pb
from protos import serving_pb2_grpc as pb_grpc
from router.clock import WorkerClock
from router.errors import LegFailed
from router.prefix_index import PrefixIndex
from router.state_watch import follow
from router.tasks import cancel_and_wait
from runtime.grpc_client import open_channel
from runtime.log import get_logger
from runtime.tls import TLS

log = get_logger()

T = TypeVar("T")


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
        self._channel = channel
        self._num_in_flight = 0
        self._num_in_flight_at_refresh = 0

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

    @contextmanager
    def in_flight(self, num_samples: int = 1) -> Iterator[None]:
        """Held for the life of a call, which makes so many sequences run."""
        self.num_picks += 1
        self._num_in_flight += num_samples
        try:
            yield
        finally:
            self._num_in_flight -= num_samples

    def take(self, state: pb.WorkerState, max_idle_s: float) -> bool:
        """It says how it is. False: changes of its cache were missed, and its index is void."""
        self.status, self.steps = state.status, state.steps
        self.num_refreshes += 1
        self._num_in_flight_at_refresh = self._num_in_flight
        problem = self.problem(state.status)
        if not problem and state.idle_ms > max_idle_s * 1000:
            problem = f"its engine has not turned for {state.idle_ms} ms"
        self.set_ready(not problem, problem)
        limit = state.status.num_blocks
        return not state.HasField("cache") or self.index.apply(
            state.status.generation, state.cache, limit
        )

    def problem(self, status: pb.WorkerStatus) -> str:
        """Why a worker that says this of itself takes no requests; empty: it does."""
        if status.role != self.role:
            return f"its role is {pb.Role.Name(status.role)}"
        if status.draining:
            return "draining"
        return "" if self.role in (status.serves or [self.role]) else "it serves another role"

    def set_ready(self, is_ready: bool, problem: str = "") -> None:
        if is_ready != self.is_ready:
            say = log.info if is_ready else log.warning
            said = {"worker": self.name, "role": pb.Role.Name(self.role), "ready": is_ready}
            say("worker changed", address=self.address, problem=problem, **said)
        self.is_ready = is_ready

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


class WorkerSet:
    """See the module. Made inside the running loop, as the channels belong to it."""

    def __init__(
        self,
        decodes: Sequence[str],
        prefills: Sequence[str],
        *,
        interval_s: float,
        timeout_s: float,
        max_idle_s: float = 10.0,
        tls: TLS | None = None,
    ) -> None:
        """`interval_s`: pause before a worker that could not be followed is tried again.
        `timeout_s`: longest silence. `max_idle_s`: longest time between two turns of an engine."""
        self.decodes = tuple(DecodeWorker(address, tls) for address in dict.fromkeys(decodes))
        self.prefills = tuple(PrefillWorker(address, tls) for address in dict.fromkeys(prefills))
        self._interval_s = interval_s
        self._timeout_s = timeout_s
        self._max_idle_s = max_idle_s
        self._changed = asyncio.Event()
        self._watches: list[asyncio.Task[None]] = []

    def start(self) -> None:
        assert not self._watches
        self._watches = [asyncio.create_task(self._watch(worker)) for worker in self._all]

    async def close(self) -> None:
        await cancel_and_wait(*self._watches)
        for worker in self._all:
            await worker.close()

    @property
    def max_model_len(self) -> int | None:
        """What every ready worker can hold; None if none is ready."""
        return min(
            (worker.status.max_model_len for worker in self._all if worker.is_ready), default=None
        )

    def report(self, worker: Worker, failure: LegFailed) -> None:
        if failure.is_worker_suspect or failure.is_goodbye:
            worker.set_ready(False, failure.reason)

    async def wait_for(self, choose: Callable[[], T | None], timeout_s: float) -> T | None:
        """What `choose` returns, as soon as it is something; None after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                while (choice := choose()) is None:
                    await self._changed.wait()
        except TimeoutError:
            return None
        return choice

    @property
    def _all(self) -> tuple[Worker, ...]:
        return (*self.decodes, *self.prefills)

    async def _watch(self, worker: Worker) -> None:
        while True:
            problem = await follow(worker, self._timeout_s, self._max_idle_s, self._note_change)
            if problem:
                worker.set_ready(False, problem)
                self._note_change()
                await asyncio.sleep(self._interval_s)

    def _note_change(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
