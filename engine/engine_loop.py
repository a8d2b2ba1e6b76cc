"""The engine thread: takes commands, schedules, steps, tells events. Knows no tensors.

It alone touches the scheduler, the pool and the runner; the public methods only enqueue. One turn:

1. Take the commands that have come. An idle loop blocks here, for half a second at most: turns
   are the engine's heartbeat. Idle, it proves that no block has leaked.
2. Schedule; tell at once who lost or found room or a cached prefix: neither waits for a step.
3. Run the step; tell what it computed, and of a prompt's last chunk also the groups of layers, as
   they are done (engine/layer_groups.py). `on_events` is called on this thread, and never with
   nothing. How long it took from 2 to here teaches the scheduler's cost model.

A step that fails for want of device memory fails its own requests. Any other exception is fatal:
it is kept in `failure`, every request is told `RequestFailed`, what comes later is refused with
EngineStopped, and the thread ends.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from functools import partial
from itertools import count
from types import MappingProxyType

from engine import step_events
from engine.books import Books, Page
from engine.command_queue import CommandQueue, answer
from engine.errors import EngineError, EngineStopped, InvalidRequest, OutOfDeviceMemory
from engine.fork import sequences
from engine.grammars import Grammars
from engine.kv_arrival import KVArrival
from engine.kv_lease import KVLease
from engine.kv_swapper import SwapCopies, Swapper
from engine.model_runner import Runner
from engine.request import (
    EngineEvent,
    EngineRequest,
    FirstToken,
    RequestFailed,
    RequestId,
    TokenLogprobs,
)
from engine.sample_grammar import SampleGrammar
from engine.scheduled_batch import ScheduledBatch, StepOutput, stuck_grammars, take_out
from engine.scheduler import Scheduler
from engine.sequence import Sequence
from engine.stats import EngineStats, StepCounters
from engine.step_meter import StepMeter
from engine.thread_priority import lower_priority

logger = logging.getLogger(__name__)

HEARTBEAT_S = 0.5
STOP_TIMEOUT_S = 30.0


def discard(events: list[EngineEvent]) -> None:
    """The `on_events` of an engine that nobody listens to."""


class EngineLoop:
    """See the module. Every public method is thread-safe and returns at once, but for `stop`."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        on_events: Callable[[list[EngineEvent]], None] = discard,
        eos_token_ids: frozenset[int] = frozenset(),
        nice: int = 0,
        heartbeat_s: float = HEARTBEAT_S,
        grammars: Grammars | None = None,
        swapper: Swapper | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.on_events = on_events
        """May be set until `start`, as the next."""
        self.on_failure: Callable[[], None] = lambda: None
        """Called by the engine thread, at its very end, if it ended by itself."""
        self.failure: Exception | None = None
        """What ended the engine, if something did."""
        self.max_model_len = scheduler.max_model_len
        self.block_size = scheduler.pool.block_size
        self.num_blocks = scheduler.pool.num_blocks
        self._scheduler = scheduler
        self._runner = runner
        self._eos_token_ids = eos_token_ids
        self._grammars = grammars or Grammars(None)
        self._nice = nice
        self._heartbeat_s = heartbeat_s
        self._arrivals = count()
        self._commands = CommandQueue()
        self._is_stopping = False
        self._is_idle = True
        self._books = Books(scheduler)
        self._events: list[EngineEvent] = []
        self._swap_copies = SwapCopies(scheduler, runner, swapper, self._commands.post)
        self._meter = StepMeter(scheduler.cost, runner.is_async, clock)
        self._counters = StepCounters(self._meter)
        self._arrival = KVArrival(scheduler, runner, self._counters)
        self._stats = self._counters.snapshot(scheduler, self._books)
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        scheduler.holdings.on_drained = lambda lease: self._commands.post(
            partial(self._arrival.drained, lease)
        )

    # ── any thread ──

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ends after the step under way, fails what is left, joins the thread. Idempotent."""
        self._commands.post(partial(setattr, self, "_is_stopping", True))
        if self._thread.ident is None:
            self._end("the engine never started")
            return
        self._thread.join(STOP_TIMEOUT_S)
        if self._thread.is_alive():
            logger.error("the engine thread did not end in %.0f s", STOP_TIMEOUT_S)

    def stats(self) -> EngineStats:
        return self._stats

    def submit(self, request: EngineRequest) -> Future[None]:
        """Raises RequestTooLong if it can never fit, InvalidRequest if grammars are not served
        here, EngineStopped. Request ids of live requests differ. The future is done when it is
        queued; for a `Leg.PREFILL` it may raise QueueFull: then no event follows."""
        self._scheduler.check_fits(request)
        self._grammars.check_served(request)
        now_ns = time.monotonic_ns()
        seq = sequences(request, self._arrivals, self.max_model_len, self._eos_token_ids, now_ns)
        samples = [seq, *seq.forks]
        queued: Future[None] = Future()
        if not self._commands.post(partial(answer, queued, partial(self._scheduler.add, seq))):
            raise EngineStopped("the engine has stopped")
        for sample in samples:
            if sample.awaits_grammar:
                self._grammars.prepare(sample.request, partial(self._post_grammar, sample))
        return queued

    def abort(self, request_id: RequestId) -> None:
        """Any leg, any state, idempotent; unknown ids are ignored. How a `Leg.PREFILL` gives its
        blocks back. No event follows, but for those of the step under way."""
        self._commands.post(partial(self._scheduler.abort, request_id))

    def finish(self, request_id: RequestId, sample: int) -> None:
        """No more of this sample is wanted; any state, idempotent. TokensOut without a token tells
        of its end, unless others are still to fork from it: then it goes on."""
        self._commands.post(partial(self._on_finish, request_id, sample))

    def claim(self, request_id: RequestId) -> Future[KVLease]:
        """`Leg.DECODE`, after `Reserved`: the lease on blocks for the whole prompt; the same one
        if claimed again. The future raises UnknownRequest, NotReserved, EngineStopped."""
        return self._commands.ask(partial(self._scheduler.claim, request_id))

    def lease(self, request_id: RequestId) -> Future[KVLease]:
        """`Leg.PREFILL`: a lease whose block table covers what `ChunkComputed` has told of. The
        future raises UnknownRequest, EngineStopped."""
        return self._commands.ask(partial(self._scheduler.lease, request_id))

    def ledger(self) -> Future[Page]:
        """Whose the blocks are. The future raises EngineStopped."""
        return self._commands.ask(self._books.page)

    def attach(
        self,
        request_id: RequestId,
        first_token_id: int | None,
        logprobs: TokenLogprobs | None = None,
        others: Mapping[int, FirstToken] = MappingProxyType({}),
    ) -> None:
        """`Leg.DECODE`, claimed: all KV of the prompt is in its blocks. It joins the next batch,
        or has finished with that token; tells TokensOut of it. `others`: of the other samples, by
        sample. See `Scheduler.attach`."""
        first = None if first_token_id is None else FirstToken(first_token_id, logprobs)
        self._commands.post(partial(self._on_attach, request_id, first, others))

    def compute_rest(self, request_id: RequestId, num_tokens: int) -> None:
        """`Leg.DECODE`: no more KV comes. [0, num_tokens) of the prompt is installed and whole;
        the engine computes the rest, or all of it if the reservation was lost."""
        self._commands.post(partial(self._arrival.compute_rest, request_id, num_tokens))

    def _post_grammar(self, seq: Sequence, outcome: SampleGrammar | EngineError) -> None:
        self._commands.post(partial(self._on_grammar, seq, outcome))

    # ── the engine thread ──

    def _run(self) -> None:
        try:
            lower_priority(self._nice)
            self._runner.start()
            while not self._is_stopping:
                self._turn()
        except Exception as error:
            logger.exception("the engine failed")
            self.failure = error
        self._end("the engine stopped" if self.failure is None else repr(self.failure))
        if self.failure is not None:
            self.on_failure()

    def _turn(self) -> None:
        has_commands = self._commands.run(self._heartbeat_s if self._is_idle else 0.0)
        self._books.audit(is_quiet=self._is_idle and not has_commands)
        self._meter.begin()
        batch = self._scheduler.schedule()
        self._counters.count_hits(batch.hits)
        self._swap_copies.begin(batch)
        self._events += step_events.events_before_step(batch, time.monotonic_ns())
        self._is_idle = not batch.seqs
        if batch.seqs:
            if self._events:
                self._tell()
            self._step(batch)
        else:
            self._meter.drop()
        self._counters.turns += 1
        self._tell()

    def _step(self, batch: ScheduledBatch) -> None:
        now_ns = time.monotonic_ns()
        for seq in batch.seqs:
            seq.first_scheduled_ns = seq.first_scheduled_ns or now_ns
        try:
            output = self._runner.run(batch.seqs, self._layer_events(batch))
        except OutOfDeviceMemory as error:
            logger.exception("a step of %d sequences failed", len(batch.seqs))
            self._meter.drop()
            self._fail(batch.seqs, str(error))
            return
        output = self._fail_stuck(batch, output)
        work = batch.work()
        computed = self._scheduler.update(batch, output.token_ids)
        self._arrival.copy_blocks()
        self._counters.count(computed)
        self._events += step_events.events_after_step(computed, output, now_ns, time.monotonic_ns())
        self._meter.end(work, is_waited_for=bool(output.token_ids or output.prompt_logprobs))

    def _layer_events(self, batch: ScheduledBatch) -> Callable[[int], None] | None:
        """Tells of layers in mid-step, if there is whom to."""
        if ends := step_events.last_chunks(batch):
            return lambda num_layers: self.on_events(step_events.events_of_layers(ends, num_layers))
        return None

    def _tell(self) -> None:
        """Publishes the stats first: who hears an event finds them as new as the event."""
        self._stats = self._counters.snapshot(self._scheduler, self._books)
        if self._events:
            events, self._events = self._events, []
            self.on_events(events)

    def _on_attach(
        self, request_id: RequestId, first: FirstToken | None, others: Mapping[int, FirstToken]
    ) -> None:
        self._events += self._arrival.attach(request_id, first, others)

    def _on_finish(self, request_id: RequestId, sample: int) -> None:
        if (seq := self._scheduler.finish(request_id, sample)) is not None:
            self._events.append(step_events.last_word(seq))

    def _on_grammar(self, seq: Sequence, outcome: SampleGrammar | EngineError) -> None:
        if isinstance(outcome, SampleGrammar):
            seq.grammar, seq.awaits_grammar = outcome, False
        elif seq in self._scheduler.seqs:
            self._fail([seq], str(outcome), is_refusal=isinstance(outcome, InvalidRequest))

    def _fail_stuck(self, batch: ScheduledBatch, output: StepOutput) -> StepOutput:
        """Fails those whose grammar allowed no token; what is left of batch and output."""
        if stuck := stuck_grammars(batch):
            output = take_out(batch, output, {seq.request_id for seq in stuck})
        for seq, failure in stuck.items():
            self._fail([seq], str(failure), is_refusal=True)
        return output

    def _end(self, reason: str) -> None:
        """Every request, also of the commands still queued, ends here."""
        self._commands.close()
        while self._attempt(self._commands.run):
            pass
        self._attempt(partial(self._fail, self._scheduler.seqs, reason))
        self._attempt(self._tell)

    def _attempt(self, action: Callable[[], object]) -> bool:
        """What `action` answers, or True and a failure kept: an engine that ends goes on ending."""
        try:
            return bool(action())
        except Exception as error:
            logger.exception("the engine could not end in order")
            self.failure = self.failure or error
            return True

    def _fail(self, seqs: Iterable[Sequence], reason: str, *, is_refusal: bool = False) -> None:
        """All hear of it before the first is touched: the scheduler itself may be what failed. A
        request fails with any of its samples."""
        failed = list(seqs)
        unfinished = dict.fromkeys(s.request_id for s in failed if s.finish_reason is None)
        self._events += [RequestFailed(name, reason, is_refusal) for name in unfinished]
        for seq in failed:
            self._scheduler.abort(seq.request_id)
