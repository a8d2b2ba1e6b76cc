"""Where requests wait, in a fair order, until workers have room. The clock of `FairQueue`.

1. `turn` lets a request through at once if nobody waits and there is room (router/room.py).
2. Else it joins the queue. One task lets the next through whenever something has changed: a worker
   has told its state, or a request has come or ended.
3. While it is served its tenant pays for the tokens that come; who waits is never behind what
   others were served meanwhile.

Who waits holds nothing of anybody.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from router.admission_metrics import AdmissionMetrics
from router.config import RouterConfig
from router.fair_queue import FairQueue
from router.placer import Placer, Prediction
from router.request import ValidPrompt
from router.room import OnTheWay, Spot, has_room
from router.tasks import cancel_and_wait
from router.ticket import OUTPUT_WORTH, Ticket
from router.workers import Worker, WorkerSet

_ACCOUNT_S = 0.1
"""While somebody waits, what others were served is accounted for this often."""


class LobbyFull(Exception):
    """There is no place for it, or another needs its place more."""


class WaitedTooLong(Exception):
    """No worker had room for it in time."""


@dataclass(slots=True)
class _Waiting:
    ticket: Ticket
    turn: asyncio.Future[None]


class Lobby:
    """See the module. Made inside the running loop."""

    def __init__(
        self, workers: WorkerSet, placer: Placer, metrics: AdmissionMetrics, config: RouterConfig
    ) -> None:
        self._workers = workers
        self._placer = placer
        self._metrics = metrics
        self._ahead_s = config.ahead_ms / 1000
        self._is_forced = config.prefill_at == "remote"
        self._is_local = config.is_local
        self._queue = FairQueue[_Waiting](max(1, config.max_queue))
        self._inside: set[Ticket] = set()
        self._unplaced: set[Ticket] = set()  # of those, with prompts that no worker has yet
        self._wake = asyncio.Event()
        self._accounted_s = 0.0
        self._drained = (0.0, 0.0)  # when it was reckoned, and what it was
        self._pumping: asyncio.Task[None] | None = None
        metrics.queue_length.set_function(lambda: len(self._queue))

    def start(self) -> None:
        self._workers.on_change.append(self._wake.set)
        self._pumping = asyncio.create_task(self._pump())

    async def close(self) -> None:
        if self._pumping is not None:
            await cancel_and_wait(self._pumping)

    @property
    def num_prompts(self) -> int:
        """That wait."""
        return sum(len(entry.item.ticket.request.prompts) for entry in self._queue)

    def is_idle_but(self, ticket: Ticket) -> bool:
        """Nothing else runs or waits, neither here nor on workers."""
        others = self._inside - {ticket}
        return not others and not self._queue and not any(w.load for w in self._workers.everyone)

    def predict(self, prompt: ValidPrompt) -> Prediction | None:
        """What would become of it, if it were let through now."""
        prefills = () if self._is_local else self._workers.prefills
        decodes = self._workers.decodes
        return self._placer.predict(prompt, decodes, prefills, is_forced=self._is_forced)

    @asynccontextmanager
    async def turn(self, ticket: Ticket, timeout_s: float) -> AsyncIterator[None]:
        """Entered when it is let through; left when it has ended. Raises LobbyFull,
        WaitedTooLong."""
        try:
            await self._wait(ticket, timeout_s)
            yield
        finally:
            self._inside.discard(ticket)
            self._unplaced.discard(ticket)
            self._account(ticket)
            self._wake.set()

    def expected_wait_s(self, ticket: Ticket) -> float:
        """Until it would be let through, by what is predicted of those that would go before it."""
        waiting = [entry.item.ticket for entry in self._queue]
        ours = [one for one in waiting if one.tenant == ticket.tenant]
        num_tenants = len({one.tenant for one in waiting} | {ticket.tenant})
        total_s, ours_s = map(self._prefill_s, (waiting, ours))
        own_s = self._prefill_s([ticket])
        num = max(1, len(self._computing()))
        return min(total_s, num_tenants * (ours_s + own_s)) / num if waiting else 0.0

    def drained_s(self) -> float:
        """Until all that wait would have been let through, as of a moment ago: a flood of refusals
        asks for it."""
        now_s = time.monotonic()
        if now_s - self._drained[0] >= _ACCOUNT_S:
            waiting = [entry.item.ticket for entry in self._queue]
            drained_s = self._prefill_s(waiting) / max(1, len(self._computing()))
            self._drained = now_s, drained_s
        return self._drained[1]

    async def _wait(self, ticket: Ticket, timeout_s: float) -> None:
        began_s, began_ns = time.monotonic(), time.monotonic_ns()
        if not self._queue and self._has_room(ticket):
            self._queue.charge(ticket.tenant, ticket.num_prompt)
            self._let_in(ticket)
            self._metrics.wait.observe(0.0)
            return
        turn = asyncio.get_running_loop().create_future()
        entry, victim = self._queue.put(
            _Waiting(ticket, turn),
            ticket.tenant,
            ticket.num_prompt,
            began_s,
            ticket.request.priority,
        )
        if victim is not None and not victim.item.turn.done():
            victim.item.turn.set_exception(LobbyFull())
        self._wake.set()
        try:
            async with asyncio.timeout(timeout_s):
                await turn
        except TimeoutError:
            if not turn.done() or turn.cancelled():  # else its turn came in that very moment
                raise WaitedTooLong from None
            turn.result()
        finally:
            self._queue.drop(entry)
            for prompt in ticket.record.prompts:
                prompt.waited(began_ns)
        self._metrics.wait.observe(time.monotonic() - began_s)

    async def _pump(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            if self._queue:
                self._account_for_all()
                self._let_through()

    def _let_through(self) -> None:
        while (entry := self._queue.head()) is not None and self._has_room(entry.item.ticket):
            if entry.item.turn.done():  # it has been told otherwise, and is about to leave
                self._queue.drop(entry)
                continue
            self._queue.take(entry)
            self._let_in(entry.item.ticket)
            entry.item.turn.set_result(None)

    def _let_in(self, ticket: Ticket) -> None:
        self._inside.add(ticket)
        self._unplaced.add(ticket)

    def _has_room(self, ticket: Ticket) -> bool:
        unplaced = self._unplaced = {one for one in self._unplaced if one.num_unplaced}
        decodes = [worker for worker in self._workers.decodes if worker.is_ready]
        if not unplaced and not all(worker.load for worker in decodes):
            return True  # one is idle: there is no need to reckon
        on_the_way = OnTheWay(
            sum(one.num_unplaced for one in unplaced),
            sum(one.num_samples for one in unplaced),
            self._prefill_s([*unplaced]),
        )
        prefills = [] if self._is_local else self._prefills()
        spots = [self._decode_spot(one, ticket) for one in decodes]
        others = [self._prefill_spot(one, ticket) for one in prefills]
        return has_room(spots, others, on_the_way, self._ahead_s)

    def _decode_spot(self, worker: Worker, ticket: Ticket) -> Spot:
        status = worker.status
        ahead_s = self._placer.ahead_s(worker, ticket.num_prompt)
        return Spot(worker.load, status.num_waiting, ahead_s, status.max_num_seqs)

    def _prefill_spot(self, worker: Worker, ticket: Ticket) -> Spot:
        ahead_s = self._placer.ahead_s(worker, ticket.num_prompt)
        return Spot(worker.load, worker.load, ahead_s)

    def _prefills(self) -> Sequence[Worker]:
        return [worker for worker in self._workers.prefills if worker.is_ready]

    def _computing(self) -> Sequence[Worker]:
        """Those that compute prompts."""
        decodes = [worker for worker in self._workers.decodes if worker.is_ready]
        return decodes if self._is_local else self._prefills() or decodes

    def _prefill_s(self, tickets: Sequence[Ticket]) -> float:
        """Of their prompts, one after the other, by the speed of some worker."""
        if not tickets or not (computing := self._computing()):
            return 0.0
        prompts = [prompt for ticket in tickets for prompt in ticket.request.prompts]
        return sum(
            self._placer.prefill_s(computing[0], len(prompt.token_ids)) for prompt in prompts
        )

    def _account_for_all(self) -> None:
        now_s = time.monotonic()
        if now_s - self._accounted_s >= _ACCOUNT_S:
            self._accounted_s = now_s
            for ticket in self._inside:
                self._account(ticket)

    def _account(self, ticket: Ticket) -> None:
        """Its tenant pays for outputs as they come; it paid for the prompt when it was let
        through."""
        served = ticket.served
        new = served.since(ticket.accounted)
        ticket.accounted = served
        self._queue.charge(ticket.tenant, OUTPUT_WORTH * new.output)
        self._metrics.served(ticket.tenant.name, "prompt", new.prompt)
        self._metrics.served(ticket.tenant.name, "output", new.output)
