"""Prefill legs: one `Prefill` call, and all the calls that one Generate stream comes to need.

1. Decode reserves room and the ticket goes to the prefill worker that the prompt was placed on,
   else to the least loaded one of its kind.
2. A worker whose queue is full has begun nothing: the same ticket goes to another. When all are
   full, that is the outcome, and the prompt waits in the router (router/queue_line.py).
3. A leg that fails excludes its worker; `Renew` asks decode for another ticket, which starts the
   next leg. A ticket that comes by itself (a transfer was lost, room was taken back) voids the
   leg under way; a worker whose transfers are lost twice is excluded too.
4. With no prefill worker left, `Renew` tells decode to compute what has not come.
5. `outcome` is set when the stream cannot go on (decode does not answer; or it was to compute the
   rest, and the client has heard token 0 already) or need not (token 0 ended every sample).
   Otherwise it stays open: decode has the rest.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Container, Sequence

import grpc

from protos import serving_pb2 as pb
from router.errors import LegFailed, QueueFull, Reopen, RouterError, from_status
from router.event_stream import read_events
from router.judging import judgement_of_leg
from router.leg_record import LegRecord
from router.messages import (
    FINISH_REASONS,
    prefill_request,
    prompt_logprobs,
    renew_request,
    token_logprobs,
)
from router.policy import pick_prefill
from router.progress import Progress
from router.tasks import cancel_and_wait
from router.workers import DecodeWorker, PrefillWorker, WorkerSet

NO_PREFILL_WORKER = "no_prefill_worker"

MAX_LOST = 2
"""Transfers of one worker that one stream may lose: some fault of the wire, or the worker's own."""


async def run_prefill(
    worker: PrefillWorker,
    request: pb.PrefillRequest,
    progress: Progress,
    leg: LegRecord,
    inactivity_s: float,
) -> None:
    """One call, to `Shipped` or to a token 0 that ends the request. Raises LegFailed, QueueFull,
    BadRequest, Reopen."""
    with worker.in_flight(), leg.running():
        call = worker.stub.Prefill(request, timeout=progress.remaining_s + 1)
        async with read_events(worker, call, inactivity_s) as events:
            while not progress.is_finished:
                event = await events.next()
                if event.HasField("first_token"):
                    first = event.first_token
                    if first.HasField("timings"):
                        leg.told(first.timings, worker)
                    reason = FINISH_REASONS[first.finish_reason]
                    if not progress.has_tokens:  # a later leg may hit what an earlier one computed
                        progress.note_cached(first.num_cached_tokens)
                    has_logprobs = first.HasField("logprobs")
                    logprobs = [token_logprobs(first.logprobs)] if has_logprobs else []
                    sample = progress.sample(first.sample)
                    sample.accept(0, [first.token_id], reason, logprobs)
                elif event.HasField("prompt_logprobs"):
                    progress.accept_prompt(*prompt_logprobs(event.prompt_logprobs))
                elif event.HasField("shipped"):
                    leg.told(event.shipped.timings, worker)
                    return


def pick_with_room(
    prefills: Sequence[PrefillWorker],
    progress: Progress,
    fingerprint: bytes | None = None,
    suspects: Container[str] = (),
) -> PrefillWorker | None:
    """Where it was placed, else the least loaded; whose queue has not refused the prompt. Raises
    QueueFull if all have. One of the suspects' addresses is taken only where no other is left."""
    full = progress.full_queues
    with_room = [worker for worker in prefills if full.has_room(worker)]
    trusted = [worker for worker in with_room if worker.address not in suspects]
    wanted = progress.placement.taken.prefill if progress.placement is not None else ""
    placed = [worker for worker in trusted if worker.address == wanted]
    choices = (placed, trusted, with_room)
    picks = (pick_prefill(choice, fingerprint) for choice in choices)
    worker = next(filter(None, picks), None)
    if worker is None:
        refused = pick_prefill(prefills, fingerprint)
        if refused is not None:
            raise QueueFull(refused.name, full.retry_after_s)
    return worker


class PrefillLegs:
    """The prefill side of one Generate stream; at most one leg runs at a time."""

    def __init__(
        self,
        workers: WorkerSet,
        decode: DecodeWorker,
        progress: Progress,
        *,
        inactivity_s: float,
        renew_timeout_s: float,
        on_failure: Callable[[PrefillWorker, LegFailed], None],
        on_full: Callable[[PrefillWorker, QueueFull], None],
        on_local: Callable[[str], None],
    ) -> None:
        self.outcome: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._workers = workers
        self._decode = decode
        self._progress = progress
        self._opened_with = progress.resume
        self._inactivity_s = inactivity_s
        self._renew_timeout_s = renew_timeout_s
        self._on_failure = on_failure
        self._on_full = on_full
        self._on_local = on_local
        self._leg: asyncio.Task[None] | None = None
        self._worker: PrefillWorker | None = None  # of the last leg, unless that has failed
        self._num_lost: Counter[str] = Counter()  # by the worker's address

    async def start(self, ticket: pb.KVTicket) -> None:
        """Runs a leg for this ticket; an earlier one is void."""
        await self._end_leg()
        if ticket.replaces_lost:
            self._note_lost()
        self._leg = asyncio.create_task(self._settle(ticket))

    async def tell_prompt(self) -> None:
        """Decode has said all, and the leg under way is to say the rest of what it knows about the
        prompt: two streams, and one may be ahead. Raises Reopen if it does not."""
        if self._leg is not None:
            await asyncio.wait({self._leg})
        if not self._progress.is_finished:
            raise Reopen("prompt_logprobs_missing")

    async def close(self) -> None:
        await self._end_leg()
        if not self.outcome.done():
            self.outcome.cancel()
        elif not self.outcome.cancelled():
            self.outcome.exception()  # somebody else may have decided the attempt: not lost

    async def _end_leg(self) -> None:
        if self._leg is not None:
            await cancel_and_wait(self._leg)

    async def _settle(self, ticket: pb.KVTicket) -> None:
        try:
            while not await self._serve(ticket):
                pass  # to the next worker
        except RouterError as error:
            if not self.outcome.done():
                self.outcome.set_exception(error)
        else:
            if self._progress.is_finished and not self.outcome.done():
                self.outcome.set_result(None)

    async def _serve(self, ticket: pb.KVTicket) -> bool:
        """False: the worker had no room, and another may have. Raises QueueFull if none has."""
        worker = self._worker = self._pick()
        if worker is None:
            await self._compute_on_decode(ticket)
            return True
        request = prefill_request(self._progress, self._opened_with, ticket)
        leg = self._progress.record.leg(
            "prefill",
            worker,
            judgement_of_leg(self._progress, self._workers, worker, self._decode.fingerprint),
            first_token=ticket.first_token,
            replaces_lost=ticket.replaces_lost,
        )
        try:
            await run_prefill(worker, request, self._progress, leg, self._inactivity_s)
        except QueueFull as full:
            self._worker = None
            self._on_full(worker, full)
            return False
        except LegFailed as failure:
            self._worker = None
            self._on_failure(worker, failure)
            # No other ticket comes if decode has all the KV already; then nothing is lost.
            await self._renew(ticket)
        return True

    def _note_lost(self) -> None:
        """Decode has lost a transfer of whose end the worker itself has said nothing, or good."""
        worker, self._worker = self._worker, None
        if worker is not None:
            self._num_lost[worker.address] += 1
            if self._num_lost[worker.address] >= MAX_LOST:
                self._on_failure(worker, LegFailed(worker.name, "transfer_lost"))

    def _pick(self) -> PrefillWorker | None:
        """Raises QueueFull if all that are left are full."""
        failed, fingerprint = self._progress.failed_prefills, self._decode.fingerprint
        excluded = {*failed, self._decode.address}
        left = [worker for worker in self._workers.prefills if worker.address not in excluded]
        # Who has just lost a transfer may be dead, before its own stream says so.
        return pick_with_room(left, self._progress, fingerprint, self._num_lost)

    async def _compute_on_decode(self, ticket: pb.KVTicket) -> None:
        """What has come stays, and decode computes the rest. Raises Reopen if the client has heard
        something since the stream was opened: decode must know of it before it samples."""
        sampling = self._progress.prompt.sampling
        if self._progress.resume != self._opened_with or sampling.num_prompt_logprobs:
            raise Reopen(NO_PREFILL_WORKER)
        self._on_local(NO_PREFILL_WORKER)
        await self._renew(ticket, NO_PREFILL_WORKER)

    async def _renew(self, ticket: pb.KVTicket, local_prefill_reason: str = "") -> None:
        request = renew_request(self._progress.prompt, ticket, local_prefill_reason)
        try:
            await self._decode.stub.Renew(request, timeout=self._renew_timeout_s)
        except grpc.aio.AioRpcError as error:
            raise from_status(self._decode.name, error) from error
