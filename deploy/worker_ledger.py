"""Whose a worker's blocks and slots are (`Ledger` of both services).

An owner is a request as its caller named it; the engine's own id has what tells two calls apart
behind a slash.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Collection, Iterator, Set

from engine.async_engine import AsyncEngine
from engine.block_ledger import BlockLedger
from engine.books import Owned
from engine.request import RequestId
from kvfabric.fabric import Fabric
from kvfabric.stats import LentSlot
from protos import serving_pb2 as pb

ANSWER_S = 10.0
"""For the engine's answer, which comes between two steps."""

_BLOCK_STATES = {
    "held": pb.LEDGER_STATE_HELD,
    "in_flight": pb.LEDGER_STATE_IN_FLIGHT,
    "promised": pb.LEDGER_STATE_PROMISED,
}
_SLOT_STATES = {"send": pb.LEDGER_STATE_SENDING, "recv": pb.LEDGER_STATE_RECEIVING}


class WorkerLedger:
    """Used on the service's loop."""

    def __init__(self, name: str, engine: AsyncEngine, fabric: Fabric, generation: int) -> None:
        self._name = name
        self._engine = engine
        self._fabric = fabric
        self._generation = generation

    async def __call__(self, role: pb.Role.ValueType) -> pb.WorkerLedger:
        """Raises EngineStopped, FabricClosed, TimeoutError."""
        engine = self._engine.engine
        has_call = self._engine.open_requests
        async with asyncio.timeout(ANSWER_S):
            page = await asyncio.wrap_future(engine.ledger())
            lent = await asyncio.wrap_future(self._fabric.lent())
        # Who came or went while the engine was asked has, or had, one.
        has_call |= self._engine.open_requests
        stats = self._fabric.stats()
        now_ns = time.monotonic_ns()
        return pb.WorkerLedger(
            name=self._name,
            role=role,
            generation=self._generation,
            num_blocks=engine.num_blocks,
            num_send_slots=stats.send_slots,
            num_recv_slots=stats.recv_slots,
            entries=[
                *_nobody(page.blocks),
                *(_of_blocks(owned, has_call, now_ns) for owned in page.owned),
                *_of_slots(lent, has_call, now_ns),
            ],
            violations=engine.stats().ledger_violations + stats.ledger_violations,
        )


def _of_blocks(owned: Owned, has_call: Set[RequestId], now_ns: int) -> pb.LedgerEntry:
    return pb.LedgerEntry(
        owner=_caller_s(owned.request_id),
        state=_BLOCK_STATES[owned.state],
        count=owned.num_blocks,
        num_shared=owned.num_shared,
        age_ms=(now_ns - owned.since_ns) // 1_000_000,
        has_call=owned.request_id in has_call,
    )


def _of_slots(
    lent: Collection[LentSlot], has_call: Set[RequestId], now_ns: int
) -> Iterator[pb.LedgerEntry]:
    counts = Counter((slot.budget, slot.owner) for slot in lent)
    first = {(slot.budget, slot.owner): now_ns for slot in lent}
    for slot in lent:
        key = slot.budget, slot.owner
        first[key] = min(first[key], slot.since_ns)
    for (budget, owner), count in counts.items():
        yield pb.LedgerEntry(
            owner=_caller_s(owner),
            state=_SLOT_STATES[budget],
            count=count,
            age_ms=(now_ns - first[budget, owner]) // 1_000_000,
            has_call=owner in has_call,
        )


def _nobody(blocks: BlockLedger) -> Iterator[pb.LedgerEntry]:
    yield pb.LedgerEntry(state=pb.LEDGER_STATE_FREE, count=blocks.free)
    yield pb.LedgerEntry(state=pb.LEDGER_STATE_CACHED, count=blocks.cached)
    if blocks.pinned:
        yield pb.LedgerEntry(state=pb.LEDGER_STATE_PINNED, count=blocks.pinned)


def _caller_s(request_id: str) -> str:
    """The id that the caller gave."""
    return request_id.rpartition("/")[0] or request_id
