"""Lets requests in: by key and limits, by objective, in a fair order. docs/admission.md has it all.

1. The gate (router/gate.py) says whose a request is.
2. `entering` counts it: requests a minute, requests at once.
3. `admitted`, once its tokens are known: tokens a minute, then its turn (router/lobby.py). What it
   was served is settled when it has ended, however it ended.

Refusals are `TooManyRequests`. Until `admitted` lets a request through, it holds nothing on any
worker.
"""

import math
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace

from prometheus_client import CollectorRegistry

from router.admission_metrics import AdmissionMetrics
from router.config import RouterConfig
from router.early_rejection import Times, judge
from router.errors import TooManyRequests
from router.key_source import KeySource
from router.lobby import Lobby, LobbyFull, WaitedTooLong
from router.objective import Wish
from router.placer import Placer
from router.rate_limit import RateLimits, Refusal
from router.record import RequestRecord
from router.request import ValidRequest
from router.tenant import Grant
from router.ticket import Ticket
from router.workers import WorkerSet

_TEXTS = {
    "requests_per_min": "This key allows {limit} requests a minute",
    "tokens_per_min": "This key allows {limit} tokens a minute",
    "concurrent": "This key allows {limit} requests at once",
}


class Admission:
    """See the module. Made inside the running loop."""

    def __init__(
        self,
        config: RouterConfig,
        workers: WorkerSet,
        placer: Placer,
        registry: CollectorRegistry,
    ) -> None:
        """Raises BadKeys."""
        self.keys = KeySource.from_config(config)
        self.limits = RateLimits()
        self.metrics = AdmissionMetrics(registry)
        self._rejects_early = config.early_rejection
        self._wish = Wish(config.slo_ttft_ms, config.slo_tpot_ms)
        self._placer = placer
        self._lobby = Lobby(workers, placer, self.metrics, config)
        self._queue_wait_s = config.queue_wait_s
        self.keys.on_reload = self._on_reload
        self._take_in_keys()

    def start(self) -> None:
        self.keys.start()
        self._lobby.start()

    async def close(self) -> None:
        await self.keys.close()
        await self._lobby.close()

    @contextmanager
    def entering(self, grant: Grant) -> Iterator[None]:
        """For the life of a request. Raises TooManyRequests."""
        self._check(self.limits.begin(grant, time.monotonic()))
        try:
            yield
        finally:
            self.limits.end(grant)

    @asynccontextmanager
    async def admitted(
        self, record: RequestRecord, request: ValidRequest
    ) -> AsyncIterator[ValidRequest]:
        """While it is served. The request as it is to be served. Raises TooManyRequests."""
        objective = record.wish.over(record.grant.wish).over(self._wish).objective
        ticket = Ticket(record, request, objective, self._placer.num_outputs)
        ticket.patience_s = self._queue_wait_s
        with self._paying(ticket):
            if self._is_judged(ticket):
                self._judge(ticket, self._lobby.expected_wait_s(ticket))
            async with self._turn(ticket):
                waited_s = time.monotonic() - ticket.arrived_s
                if self._is_judged(ticket):
                    self._judge(ticket, waited_s)
                yield request.with_objective(objective.after(waited_s))
                self._note_outcome(ticket)

    @property
    def num_in_line(self) -> int:
        """Prompts that wait for their turn."""
        return self._lobby.num_prompts

    def _is_judged(self, ticket: Ticket) -> bool:
        """Nothing is refused while nothing runs: who never runs anything never learns better."""
        has_objective = self._rejects_early and not ticket.objective.is_none
        return has_objective and not self._lobby.is_idle_but(ticket)

    def _judge(self, ticket: Ticket, wait_s: float) -> None:
        """Raises TooManyRequests if it would miss its objective because of load."""
        prompt = max(ticket.request.prompts, key=lambda one: len(one.token_ids))
        found = self._lobby.predict(replace(prompt, objective=ticket.objective.after(wait_s)))
        if found is None:
            return
        if ticket.objective.ttft_s >= found.idle.ttft_s:  # else nobody can meet it
            ticket.patience_s = min(ticket.patience_s, ticket.objective.ttft_s)
        loaded = Times(wait_s + found.loaded.ttft_s, found.loaded.tpot_s)
        miss = judge(ticket.objective, loaded, found.idle, found.life_s)
        if miss is not None:
            what = {"slo_ttft": "time to first token", "slo_tpot": "time per output token"}
            text = (
                f"The {what[miss.reason]} would be {miss.predicted_s * 1000:.0f} ms just now, more "
                "than the objective of this request"
            )
            self._refuse(miss.reason, text, miss.retry_after_s)

    def _note_outcome(self, ticket: Ticket) -> None:
        objective, record = ticket.objective, ticket.record
        if (ttft_s := record.ttft_s) is not None and math.isfinite(objective.ttft_s):
            self.metrics.objective("ttft", is_met=ttft_s <= objective.ttft_s)
        if (tpot_s := ticket.tpot_s()) is not None and math.isfinite(objective.tpot_s):
            self.metrics.objective("tpot", is_met=tpot_s <= objective.tpot_s)

    @asynccontextmanager
    async def _turn(self, ticket: Ticket) -> AsyncIterator[None]:
        try:
            async with self._lobby.turn(ticket, ticket.patience_s):
                yield
        except LobbyFull:
            text = "Too many requests wait for a worker"
            self._refuse("queue_full", text, self._lobby.drained_s())
        except WaitedTooLong:
            text = f"No worker had room for the request within {ticket.patience_s:g} s"
            self._refuse("queue_deadline", text, self._lobby.drained_s())

    @contextmanager
    def _paying(self, ticket: Ticket) -> Iterator[None]:
        grant, taken = ticket.record.grant, ticket.num_expected
        self._check(self.limits.take_tokens(grant, taken, time.monotonic()))
        try:
            yield
        finally:
            self.limits.settle(grant, taken, ticket.served.total, time.monotonic())

    def _check(self, refusal: Refusal | None) -> None:
        if refusal is not None:
            text = _TEXTS[refusal.reason].format(limit=refusal.limit)
            self._refuse(refusal.reason, text, refusal.retry_after_s)

    def _refuse(self, reason: str, text: str, retry_after_s: float) -> None:
        self.metrics.refused(reason)
        raise TooManyRequests(text, retry_after_s)

    def _on_reload(self, went_well: bool) -> None:
        self.metrics.reloaded(went_well)
        if went_well:
            self._take_in_keys()

    def _take_in_keys(self) -> None:
        grants = self.keys.grants
        self.limits.keep(grants)
        self.metrics.keys.set(len(grants))
        names = ["default"] if self.keys.is_open else [grant.tenant.name for grant in grants]
        self.metrics.name_tenants(names)
