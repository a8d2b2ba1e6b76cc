"""Serves one prompt: picks workers, runs attempts, and makes a fault cost time, not the answer.

1. Pick the pair that router/placer.py finds best, else the least loaded; wait a bounded time for
   one if no worker is ready.
2. Run an attempt (router/decode_leg.py). One token needs no handoff: a prefill leg alone.
3. A full prefill queue is no fault: the prompt gives its promise back, waits in the router's line
   for a bounded time, and tries again; at the end the client hears 429. Where the client has tokens
   it does not wait: decode computes the prompt.
4. A failed worker is not asked again while another is left; the next attempt carries the tokens
   delivered so far, within the bounds of router/retry.py. A refused request is the client's error
   at once.

The deadline of the request stands over all of it. `stop` ends every prompt with an error.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Literal

from router.config import RouterConfig
from router.decode_leg import run_attempt
from router.errors import (
    LegFailed,
    NoWorkerReady,
    QueueFull,
    Reopen,
    RequestTimedOut,
    ShuttingDown,
)
from router.judging import judgement_of_leg, judgement_of_pair
from router.leg_record import UNJUDGED, AttemptRecord
from router.live import LivePrompts
from router.messages import prefill_request
from router.metrics import RouterMetrics
from router.patience import Patience
from router.placer import Placer
from router.policy import Pair, pick_pair
from router.prefill_leg import (
    NO_PREFILL_WORKER,
    PrefillLegs,
    pick_with_room,
    run_prefill,
)
from router.progress import Progress
from router.record import PromptRecord
from router.request import TokenLogprobs, ValidPrompt
from router.retry import Attempts
from router.sample import Deliver
from router.workers import DecodeWorker, PrefillWorker, Worker, WorkerSet
from runtime.log import get_logger

log = get_logger()

Leg = Literal["prefill", "decode"]


class Dispatcher:
    def __init__(self, workers: WorkerSet, config: RouterConfig, metrics: RouterMetrics) -> None:
        self._workers = workers
        self._config = config
        self._metrics = metrics
        self.placer = Placer(config)
        self._patience = Patience(workers, config)
        self.live = LivePrompts(config.ledger_grace_s, time.monotonic)
        self._deadlines: set[asyncio.Timeout] = set()
        self._is_stopping = False

    @property
    def is_ready(self) -> bool:
        """A prompt could be served as the mode promises, or as the workers' roles say: where the
        last prefill worker has been given another one, decode computes prompts."""
        prefills = self._workers.prefills
        pair = pick_pair(self._workers.decodes, prefills)
        return pair is not None and (
            self._config.is_colocated or pair.prefill is not None or not prefills
        )

    @property
    def num_in_line(self) -> int:
        """Prompts that wait here for a prefill queue with room."""
        return self._patience.num_in_line

    async def max_model_len(self) -> int:
        """Prompt and output tokens that any worker can hold. Raises NoWorkerReady."""
        wait_s = self._config.ready_wait_s
        length = await self._workers.wait_for(lambda: self._workers.max_model_len, wait_s)
        if length is None:
            raise NoWorkerReady(wait_s)
        return length

    async def run(
        self,
        prompt: ValidPrompt,
        deliver: Sequence[Deliver],
        note_cached: Callable[[int], None] = lambda num_tokens: None,
        record: PromptRecord | None = None,
    ) -> Sequence[TokenLogprobs]:
        """Delivers the tokens of each sample, the last with its finish reason; returns the logprobs
        of the prompt's tokens but the first, if they are wanted. Raises ApiError. `note_cached`
        hears how many prompt tokens a worker had cached, if any; `record` is written as it goes."""
        timeout_s = self._config.request_timeout_s
        deadline = asyncio.get_running_loop().time() + timeout_s
        progress = Progress(prompt, deliver, deadline, note_cached, record)
        try:
            async with asyncio.timeout(0 if self._is_stopping else timeout_s) as timeout:
                self._deadlines.add(timeout)
                try:
                    with self.live.running(prompt.request_id):
                        await self._run(progress)
                finally:
                    self._deadlines.discard(timeout)
                    progress.record.ended()
        except TimeoutError as error:
            raise (ShuttingDown() if self._is_stopping else RequestTimedOut(timeout_s)) from error
        return progress.prompt_logprobs

    def stop(self) -> None:
        """From now on every prompt, old or new, ends with ShuttingDown."""
        self._is_stopping = True
        for deadline in self._deadlines:
            if not deadline.expired():
                deadline.reschedule(asyncio.get_running_loop().time())

    async def _run(self, progress: Progress) -> None:
        attempts = Attempts(self._config.max_attempts)
        self._patience.note_prompt()
        last: LegFailed | Reopen = Reopen("no attempt was made")
        while True:
            num_tokens, failed = progress.num_tokens, frozenset(progress.failed_prefills)
            try:
                with progress.record.attempting() as attempt:
                    await self._attempt(progress, attempt)
            except QueueFull as full:
                await self._patience.for_room(progress, full, lambda: self._prefills_left(progress))
                continue
            except (LegFailed, Reopen) as failure:
                last = failure
            for sample in progress.samples:
                sample.finish_if_full()
            if progress.is_finished:
                return
            got_on = progress.num_tokens > num_tokens
            if got_on:  # who failed it long ago may be well again
                progress.failed_prefills -= failed
            attempts.failed(got_on=got_on)
            await self._patience.for_retry(progress, attempts, last)
            if progress.has_tokens:
                self._metrics.migrations.labels(last.reason).inc()

    async def _attempt(self, progress: Progress, attempt: AttemptRecord) -> None:
        if (prefill := self._pick_for_one_token(progress)) is not None:
            attempt.picked(UNJUDGED, None)
            await self._run_one_token(prefill, progress)
            return
        pair = await self._pick_pair(progress)
        attempt.placement, picked_s = progress.placement, time.monotonic()
        prefills = self._prefills_left(progress)
        judgement = judgement_of_pair(progress, self._workers.decodes, prefills, pair.decode)
        attempt.picked(judgement, self._local_reason(pair, progress))
        try:
            # Counted from the pick on: prompts of the same moment must not all go to one worker.
            with pair.decode.in_flight(len(progress.samples)):
                await run_attempt(
                    pair.decode,
                    progress,
                    self._prefill_legs(pair.decode, progress),
                    local_prefill_reason=attempt.local_prefill_reason or None,
                    inactivity_s=self._config.inactivity_s,
                )
            self._note_outcome(progress, attempt, picked_s)
        except LegFailed as failure:
            progress.failed_decodes[pair.decode.address] = pair.decode.num_refreshes
            self._note(pair.decode, "decode", failure)
            raise
        except Reopen as reopen:
            self._metrics.count_retry("decode", reopen.reason)
            raise

    def _note_outcome(self, progress: Progress, attempt: AttemptRecord, picked_s: float) -> None:
        outcome = self.placer.ended(progress, picked_s)
        if outcome is not None:
            attempt.saved_s = outcome.saved_s
            self._metrics.disaggregation.observe(outcome.way, outcome.saved_s)

    def _pick_for_one_token(self, progress: Progress) -> PrefillWorker | None:
        """Prefill samples token 0 itself: if it is the only one, nothing is handed over."""
        if self._config.is_local or progress.prompt.sampling.max_tokens > 1:
            return None
        return pick_with_room(self._prefills_left(progress), progress)

    async def _run_one_token(self, worker: PrefillWorker, progress: Progress) -> None:
        known = [None if outputs is None else () for outputs in progress.resume]
        request = prefill_request(progress, known, ticket=None)
        judgement = judgement_of_leg(progress, self._workers, worker)
        leg = progress.record.leg("prefill", worker, judgement)
        try:
            await run_prefill(worker, request, progress, leg, self._config.inactivity_s)
        except QueueFull as full:
            self._note_full(progress, worker, full)
            raise
        except LegFailed as failure:
            self._note_prefill(progress, worker, failure)
            raise

    async def _pick_pair(self, progress: Progress) -> Pair[DecodeWorker, PrefillWorker]:
        """The best pair that has not failed this prompt; else a decode worker that is back."""

        def pick() -> Pair[DecodeWorker, PrefillWorker] | None:
            failed = progress.failed_decodes
            decodes = self._workers.decodes
            fresh = [worker for worker in decodes if worker.address not in failed]
            back = [w for w in decodes if w.num_refreshes > failed.get(w.address, w.num_refreshes)]
            prefills = self._prefills_left(progress)
            is_forced = self._config.prefill_at == "remote"
            placed = self.placer.place(progress, fresh, prefills, is_forced=is_forced)
            return placed or pick_pair(fresh, prefills) or pick_pair(back, prefills)

        config = self._config
        wait_s = config.resume_wait_s if progress.has_tokens else config.ready_wait_s
        pair = await self._workers.wait_for(pick, wait_s)
        if pair is None:
            raise NoWorkerReady(wait_s)
        return pair

    def _prefills_left(self, progress: Progress) -> Sequence[PrefillWorker]:
        if self._config.is_local or progress.is_for_decode_alone:
            return ()
        failed = progress.failed_prefills
        return [worker for worker in self._workers.prefills if worker.address not in failed]

    def _local_reason(
        self, pair: Pair[DecodeWorker, PrefillWorker], progress: Progress
    ) -> str | None:
        if pair.prefill is not None:
            return None
        placed = progress.placement
        reason = "cheaper_here" if placed is not None and placed.other else NO_PREFILL_WORKER
        if self._config.is_local:
            reason = "colocated" if self._config.is_colocated else "forced_local"
        if progress.is_for_decode_alone:
            reason = "queue_full"
        self._metrics.local_prefills.labels(reason).inc()
        return reason

    def _note_local(self, progress: Progress, reason: str) -> None:
        """Of a prompt that was to be relayed."""
        self._metrics.local_prefills.labels(reason).inc()
        progress.record.attempt.local_prefill_reason = reason

    def _prefill_legs(self, decode: DecodeWorker, progress: Progress) -> PrefillLegs:
        return PrefillLegs(
            self._workers,
            decode,
            progress,
            inactivity_s=self._config.inactivity_s,
            renew_timeout_s=self._config.renew_timeout_s,
            on_failure=lambda worker, failure: self._note_prefill(progress, worker, failure),
            on_full=lambda worker, full: self._note_full(progress, worker, full),
            on_local=lambda reason: self._note_local(progress, reason),
        )

    def _note_full(self, progress: Progress, worker: PrefillWorker, full: QueueFull) -> None:
        progress.full_queues.note(worker, full)
        self._metrics.count_retry("prefill", "queue_full")

    def _note_prefill(self, progress: Progress, worker: PrefillWorker, failure: LegFailed) -> None:
        progress.failed_prefills.add(worker.address)
        self._note(worker, "prefill", failure)

    def _note(self, worker: Worker, leg: Leg, failure: LegFailed) -> None:
        self._workers.report(worker, failure)
        self._metrics.count_retry(leg, failure.reason)
        log.warning("leg failed", leg=leg, worker=worker.name, **_words(failure))


def _words(failure: LegFailed) -> dict[str, str]:
    return {"reason": failure.reason, "detail": failure.detail}
