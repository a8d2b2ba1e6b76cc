"""`GET /v1/ledger`: whose every block and slot of every worker is, and what is nobody's.

1. All workers are asked at the same time, each within the deadline; who does not answer is named.
2. An owner that has been there for longer than the grace, and is no live prompt of this router, is
   an orphan: a leak, or another router's request (docs/handoff.md).
3. A background task asks now and then, for the metrics that alerts watch.
"""

import asyncio
from typing import Literal

import grpc
from prometheus_client import CollectorRegistry, Gauge
from pydantic import BaseModel

from protos import serving_pb2 as pb
from router.live import LivePrompts
from router.tasks import cancel_and_wait
from router.workers import Worker, WorkerSet

State = Literal["free", "cached", "pinned", "held", "in_flight", "promised", "sending", "receiving"]

_STATES: dict[int, State] = {
    pb.LEDGER_STATE_FREE: "free",
    pb.LEDGER_STATE_CACHED: "cached",
    pb.LEDGER_STATE_PINNED: "pinned",
    pb.LEDGER_STATE_HELD: "held",
    pb.LEDGER_STATE_IN_FLIGHT: "in_flight",
    pb.LEDGER_STATE_PROMISED: "promised",
    pb.LEDGER_STATE_SENDING: "sending",
    pb.LEDGER_STATE_RECEIVING: "receiving",
}
_SLOTS = ("sending", "receiving")


class Entry(BaseModel):
    """Blocks, or slots (`sending`, `receiving`), of one owner in one state."""

    owner: str | None
    """A request's id, as `x-baton-request-id` has it, with `-` and the prompt's index. Null:
    nobody's."""
    state: State
    count: int
    num_shared: int
    """Held beside those, and counted as an older owner's."""
    age_ms: int
    has_call: bool
    """The owner's call is open on the worker."""


class WorkerBooks(BaseModel):
    worker: str
    address: str
    role: Literal["decode", "prefill"]
    problem: str | None
    """Why it did not answer; null: it did."""
    num_blocks: int
    num_send_slots: int
    num_recv_slots: int
    adds_up: bool
    """The blocks of all entries are num_blocks."""
    violations: int
    """Audits by the worker itself that found counts and owners to disagree."""
    entries: list[Entry]


class Orphan(BaseModel):
    worker: str
    owner: str
    age_ms: int
    has_call: bool
    counts: dict[State, int]


class Ledger(BaseModel):
    object: Literal["ledger"] = "ledger"
    grace_s: float
    workers: list[WorkerBooks]
    orphans: list[Orphan]


class LedgerWatch:
    """See the module. Made inside the running loop."""

    def __init__(
        self,
        workers: WorkerSet,
        live: LivePrompts,
        registry: CollectorRegistry,
        *,
        interval_s: float,
        timeout_s: float,
        grace_s: float,
    ) -> None:
        def gauge(name: str, text: str) -> Gauge:
            return Gauge(name, text, ["worker"], registry=registry)

        self._workers = workers
        self._live = live
        self._interval_s = interval_s
        self._timeout_s = timeout_s
        self._grace_s = grace_s
        self._task: asyncio.Task[None] | None = None
        self._orphans = gauge(
            "baton_ledger_orphans",
            "Owners of blocks or slots that no live request of this router is; see /v1/ledger.",
        )
        self._without_call = gauge(
            "baton_ledger_owners_without_call",
            "Owners of blocks or slots whose call on the worker is over.",
        )
        self._unanswered = gauge("baton_ledger_unanswered", "1: it did not tell its ledger.")

    def start(self) -> None:
        """0 is no interval: then nobody asks but by GET."""
        if self._interval_s > 0:
            self._task = asyncio.create_task(self._watch())

    async def close(self) -> None:
        if self._task is not None:
            await cancel_and_wait(self._task)

    async def read(self) -> Ledger:
        """Of this moment; takes no longer than the deadline."""
        # A worker that serves both has one ledger.
        asked = {one.address: one for one in (*self._workers.prefills, *self._workers.decodes)}
        books = await asyncio.gather(*(self._ask(worker) for worker in asked.values()))
        orphans = [orphan for one in books for orphan in self._orphans_of(one)]
        ledger = Ledger(grace_s=self._grace_s, workers=[*books], orphans=orphans)
        self._observe(ledger)
        return ledger

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self._interval_s)
            await self.read()

    async def _ask(self, worker: Worker) -> WorkerBooks:
        problem, told = None, pb.WorkerLedger()
        try:
            told = await worker.stub.Ledger(pb.LedgerRequest(), timeout=self._timeout_s)
        except grpc.aio.AioRpcError as error:
            problem = error.code().name.lower()
        entries = [_entry(one) for one in told.entries]
        in_blocks = sum(one.count for one in entries if one.state not in _SLOTS)
        return WorkerBooks(
            worker=worker.name,
            address=worker.address,
            role="decode" if worker.role == pb.ROLE_DECODE else "prefill",
            problem=problem,
            num_blocks=told.num_blocks,
            num_send_slots=told.num_send_slots,
            num_recv_slots=told.num_recv_slots,
            adds_up=in_blocks == told.num_blocks,
            violations=told.violations,
            entries=entries,
        )

    def _orphans_of(self, books: WorkerBooks) -> list[Orphan]:
        orphans: dict[str, Orphan] = {}
        for one in books.entries:
            if one.owner is None or self._live.may_own(one.owner):
                continue
            orphan = orphans.setdefault(
                one.owner,
                Orphan(worker=books.worker, owner=one.owner, age_ms=0, has_call=False, counts={}),
            )
            orphan.age_ms = max(orphan.age_ms, one.age_ms)
            orphan.has_call |= one.has_call
            orphan.counts[one.state] = orphan.counts.get(one.state, 0) + one.count
        return [orphan for orphan in orphans.values() if orphan.age_ms > self._grace_s * 1000]

    def _observe(self, ledger: Ledger) -> None:
        for books in ledger.workers:
            name = books.worker
            self._unanswered.labels(name).set(books.problem is not None)
            lost = {one.owner for one in books.entries if one.owner and not one.has_call}
            num_orphans = sum(orphan.worker == name for orphan in ledger.orphans)
            self._orphans.labels(name).set(num_orphans)
            self._without_call.labels(name).set(len(lost))


def _entry(told: pb.LedgerEntry) -> Entry:
    return Entry(
        owner=told.owner or None,
        state=_STATES[told.state],
        count=told.count,
        num_shared=told.num_shared,
        age_ms=told.age_ms,
        has_call=told.has_call,
    )
