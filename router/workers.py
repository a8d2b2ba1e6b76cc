"""The workers this router knows: one channel each, and what they said of themselves last.

1. `start` opens the channels and a task per worker, which follows its state
   (router/state_watch.py).
2. A worker is ready while its state comes in time, its engine turns, and it says that it
   serves the role.
3. `report` takes a failed call into account: a worker that may be gone counts as not ready until
   it tells its state again, and one whose calls fail too often (router/breaker.py) until a probe
   of ours has gone well; unless it is the last of its role.
4. Workers join (`add`) and leave (`remove`) at any time; one that says that it serves another role
   too is known for that as well.
5. `close` ends the tasks and the channels; by then no call is open any more.

`wait_for` sleeps until something has changed.
"""

import asyncio
import random
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from protos import serving_pb2 as pb
from router.errors import LegFailed
from router.probe import probe
from router.state_watch import follow
from router.tasks import cancel_and_wait
from router.worker import DecodeWorker, PrefillWorker, Worker
from runtime.log import get_logger
from runtime.tls import TLS

log = get_logger()

__all__ = ["DecodeWorker", "PrefillWorker", "Worker", "WorkerSet"]

T = TypeVar("T")

PROBE_TIMEOUT_S = 5.0


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
        self._interval_s = interval_s
        self._timeout_s = timeout_s
        self._max_idle_s = max_idle_s
        self._tls = tls
        self._changed = asyncio.Event()
        self.on_change: list[Callable[[], None]] = []
        """Who hears at once that something has changed."""
        self._watches: dict[Worker, asyncio.Task[None]] = {}
        self._others: set[asyncio.Task[None]] = set()  # probes, and workers that are leaving
        self.on_heard: Callable[[Worker], None] = lambda worker: None
        """Called when one has told its state."""
        self._is_started = False
        self._all: tuple[Worker, ...] = ()
        for address in decodes:
            self.add(address, pb.ROLE_DECODE)
        for address in prefills:
            self.add(address, pb.ROLE_PREFILL)

    @property
    def decodes(self) -> tuple[DecodeWorker, ...]:
        """That serve as such, ready or not."""
        return tuple(one for one in self._all if isinstance(one, DecodeWorker) and one.is_on_duty)

    @property
    def prefills(self) -> tuple[PrefillWorker, ...]:
        return tuple(one for one in self._all if isinstance(one, PrefillWorker) and one.is_on_duty)

    @property
    def everyone(self) -> tuple[Worker, ...]:
        """Those that serve as something else just now, too: each process once a role."""
        return self._all

    def start(self) -> None:
        assert not self._is_started
        self._is_started = True
        for worker in self._all:
            self._follow(worker)

    async def close(self) -> None:
        await cancel_and_wait(*self._watches.values(), *self._others)
        for worker in self._all:
            await worker.close()

    def add(self, address: str, role: pb.Role.ValueType) -> None:
        """It joins, if it is not there in that role."""
        if any(worker.address == address and worker.role == role for worker in self._all):
            return
        kind = DecodeWorker if role == pb.ROLE_DECODE else PrefillWorker
        worker = kind(address, self._tls)
        self._all = (*self._all, worker)
        if self._is_started:
            self._follow(worker)

    def remove(self, address: str) -> None:
        """It leaves, in all its roles; calls of ours that are open there run to their end."""
        for worker in [one for one in self._all if one.address == address]:
            self._all = tuple(one for one in self._all if one is not worker)
            worker.set_ready(False, "removed")
            self._spawn(self._let_go(worker))
        self._note_change()

    @property
    def max_model_len(self) -> int | None:
        """What every ready worker can hold; None if none is ready."""
        return min(
            (worker.status.max_model_len for worker in self._all if worker.is_ready), default=None
        )

    def report(self, worker: Worker, failure: LegFailed) -> None:
        if failure.is_goodbye:
            worker.set_ready(False, failure.reason)
            return
        worker.breaker.failed(time.monotonic(), random.random())
        self._note_last_resort(worker)
        is_ready = worker.is_ready and not failure.is_worker_suspect
        worker.set_ready(is_ready, "" if is_ready else failure.reason)

    async def wait_for(self, choose: Callable[[], T | None], timeout_s: float) -> T | None:
        """What `choose` returns, as soon as it is something; None after `timeout_s`."""
        if (choice := choose()) is not None:
            return choice
        try:
            async with asyncio.timeout(timeout_s):
                while choice is None:
                    await self._changed.wait()
                    choice = choose()
        except TimeoutError:
            return None
        return choice

    def _follow(self, worker: Worker) -> None:
        self._watches[worker] = asyncio.create_task(self._watch(worker))

    async def _watch(self, worker: Worker) -> None:
        def on_change() -> None:
            self._look_at(worker)
            self._note_change()

        while True:
            problem = await follow(worker, self._timeout_s, self._max_idle_s, on_change)
            if problem:
                worker.set_ready(False, problem)
                worker.streams.give_up_silent()
                self._note_change()
                await asyncio.sleep(self._interval_s)

    def _look_at(self, worker: Worker) -> None:
        """It has told its state: it may serve another role too, or be worth a probe."""
        self._note_last_resort(worker)
        self.on_heard(worker)
        for role in worker.status.serves:
            self.add(worker.address, role)
        if worker.breaker.begin_probe(time.monotonic()):
            self._spawn(self._probe(worker))

    def _note_last_resort(self, worker: Worker) -> None:
        others = (one for one in self._all if one.role == worker.role and one is not worker)
        worker.is_last_resort = not any(other.is_ready for other in others)

    async def _probe(self, worker: Worker) -> None:
        went_well = False
        try:
            went_well = await probe(worker, PROBE_TIMEOUT_S)
        finally:
            worker.breaker.end_probe(time.monotonic(), random.random(), went_well=went_well)
        log.info("worker probed", worker=worker.name, went_well=went_well)

    async def _let_go(self, worker: Worker) -> None:
        watch = self._watches.pop(worker, None)
        if watch is not None:
            await cancel_and_wait(watch)
        try:
            await worker.idle()
        finally:
            await worker.close()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._others.add(task)
        task.add_done_callback(self._others.discard)

    def _note_change(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
        for hear in self.on_change:
            hear()
