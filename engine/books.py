"""The books of the pool's blocks: whose they are, and whether what is counted is what is owned.

Engine thread only, and pure but for the log. Two kinds of wrong:

1. Counts and owners disagree: a block or a promise was lost. The worker goes on with what is left;
   it is counted, said, and an alert watches the count. Looked for every few turns, by sums alone.
2. One block is two owners' at a time: KV may be overwritten. That is an AssertionError, and ends
   the engine. Looked for, block by block, when there is nothing else to do.
"""

import logging
from typing import Literal, NamedTuple

from engine.block_ledger import BlockLedger
from engine.request import RequestId
from engine.scheduler import Scheduler

logger = logging.getLogger(__name__)

TURNS_BETWEEN_AUDITS = 16

State = Literal["held", "promised", "in_flight"]


class Owned(NamedTuple):
    """Blocks of one request in one state. Over all of them each used block is counted once."""

    request_id: RequestId
    state: State
    num_blocks: int
    num_shared: int
    """It holds these beside those; they are counted as an older request's."""
    since_ns: int
    """When the request came, by time.monotonic_ns."""


class Page(NamedTuple):
    """All of it at one moment."""

    blocks: BlockLedger
    owned: list[Owned]


class Books:
    """See the module."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.num_violations = 0
        """Audits that found the sums wrong."""
        self._scheduler = scheduler
        self._turns = 0
        self._is_checked = True
        self._last = ""

    def audit(self, *, is_quiet: bool) -> None:
        """Each turn. `is_quiet`: nothing is to be done."""
        self._turns += 1
        if is_quiet:
            if not self._is_checked:
                self._is_checked = True
                self._scheduler.pool.check()
                self._note(self._discrepancy(every_block=True))
        else:
            self._is_checked = False
            if self._turns % TURNS_BETWEEN_AUDITS == 0:
                self._note(self._discrepancy())

    def page(self) -> Page:
        return Page(self._scheduler.pool.ledger(), self._owned())

    def _discrepancy(self, *, every_block: bool = False) -> str:
        scheduler = self._scheduler
        return scheduler.holdings.discrepancy(scheduler.seqs, every_block=every_block)

    def _note(self, discrepancy: str) -> None:
        if discrepancy:
            self.num_violations += 1
            if discrepancy != self._last:
                logger.error("the ledger of blocks is wrong: %s", discrepancy)
        self._last = discrepancy

    def _owned(self) -> list[Owned]:
        """Of all requests, the oldest first."""
        found: dict[tuple[RequestId, State], Owned] = {}

        def add(owned: Owned) -> None:
            key = owned.request_id, owned.state
            before = found.get(key, owned._replace(num_blocks=0, num_shared=0))
            found[key] = before._replace(
                num_blocks=before.num_blocks + owned.num_blocks,
                num_shared=before.num_shared + owned.num_shared,
            )

        counted: set[int] = set()
        for seq in self._scheduler.seqs:
            if own := set(seq.block_table):
                held = Owned(seq.request_id, "held", len(own - counted), 0, seq.submitted_ns)
                add(held._replace(num_shared=len(own) - held.num_blocks))
                counted |= own
            if seq.num_promised_blocks:
                promised = seq.num_promised_blocks
                add(Owned(seq.request_id, "promised", promised, 0, seq.submitted_ns))
        for lease in self._scheduler.holdings.draining:
            leaving = set(lease.block_table) - counted
            add(Owned(lease.request_id, "in_flight", len(leaving), 0, lease.since_ns))
            counted |= leaving
        return [*found.values()]
