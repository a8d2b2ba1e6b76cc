"""One decode leg: the life of a `Generate` call.

1. The request goes to the engine. With `local_prefill` it simply runs there.
2. Otherwise the engine reserves room for the prompt (waiting for it if need be); then a ticket
   goes to the router, and the KV that the prefix cache lacks comes over the fabric
   (decode_server/handoff.py). If it lacks none, there is no ticket: the engine just runs.
3. A lost transfer, or a prefill leg that the router gave up (`renew`), costs another ticket on
   this same stream; or the engine computes what has not come, if no prefill worker is left or that
   is quicker (decode_server/tail.py). Memory pressure may take the room back: the leg waits again.
4. COMMIT attaches the sequence to the batch, with all samples of the request, which fork from it
   (engine/fork.py); tokens flow until the last finishes.

However the call ends, leaving `run` drops the ticket and frees the blocks: the stream is the
lease.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable

from decode_server.commit import read_commit
from decode_server.handoff import Committed, Handoff, Lost
from decode_server.messages import note_installed, prompt_logprobs_event, ticket_message
from decode_server.metrics import DecodeMetrics
from decode_server.tail import TailPolicy
from engine.async_engine import AsyncEngine, Mailbox
from engine.request import (
    EngineEvent,
    EngineRequest,
    FinishReason,
    FirstToken,
    Leg,
    PrefixHit,
    PromptLogprobs,
    RequestFailed,
    ReservationLost,
    Reserved,
    TokensOut,
)
from kvfabric.errors import BadFrame, TransferAborted
from kvfabric.fabric import Fabric
from kvfabric.ticket import Ticket
from protos import serving_pb2 as pb
from runtime.log import get_logger

log = get_logger()

HEARTBEAT_S = 1.0

_FINISH_REASONS = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
}


class DecodeLeg:
    """See the module."""

    def __init__(
        self,
        engine: AsyncEngine,
        fabric: Fabric,
        metrics: DecodeMetrics,
        tails: TailPolicy,
        request: EngineRequest,
    ) -> None:
        self._engine = engine
        self._metrics = metrics
        self._tails = tails
        eos_token_ids = engine.engine.model_config.eos_token_ids
        samples = request.each()
        self._ended = [one.sample for one in samples if one.is_ended(eos_token_ids)]
        live = [one for one in samples if one.sample not in self._ended]
        self._num_live = len(live)
        self._request = request.only(live) if live else request
        self._mailbox: Mailbox[EngineEvent | Committed | Lost] = Mailbox()
        self._handoff = Handoff(
            engine.engine,
            fabric,
            request.request_id,
            len(request.prompt_token_ids),
            self._post_threadsafe(asyncio.get_running_loop()),
        )
        self._timings = pb.Timings()
        self._num_cached_tokens = 0
        self._num_tickets = self._num_asked = 0
        self._turns_seen = -1
        self._local_reason = ""  # why the engine computes the rest of the prompt, or is to
        self._computes_rest = False
        self._opened_ns = time.monotonic_ns()
        self._ticket_ns = self._committed_ns = self._joined_ns = 0

    async def run(self, write: Callable[[pb.GenerateEvent], Awaitable[None]]) -> None:
        """Writes the events of the call. Raises EngineError."""
        for sample in self._ended:
            # The worker before us died between the end token and its `finished`.
            await write(self._finished(sample, FinishReason.STOP))
        if not self._num_live:
            return
        with self._engine.open(self._request, self._mailbox.put):
            try:
                while self._num_live:
                    item = await self._mailbox.next(HEARTBEAT_S)
                    for event in self._react(item):
                        if event.HasField("reserved"):
                            await self._handoff.welcomed()
                        await write(event)
            finally:
                self._handoff.drop()

    def renew(self, transfer_id: bytes, local_reason: str = "") -> None:
        """The prefill leg of that ticket failed, says the router: mint another one, or let the
        engine compute the rest, for that reason."""
        if self._handoff.is_out(transfer_id):
            self._local_reason = local_reason
            self._handoff.give_up(transfer_id)

    def finish(self, sample: int) -> None:
        """The router wants no more of it: it has found a stop string."""
        self._engine.engine.finish(self._request.request_id, sample)

    def _post_threadsafe(
        self, loop: asyncio.AbstractEventLoop
    ) -> Callable[[Committed | Lost], None]:
        def post(verdict: Committed | Lost) -> None:
            try:
                loop.call_soon_threadsafe(self._mailbox.put, verdict)
            except RuntimeError:  # the loop is closed: the process is ending, nobody listens
                return

        return post

    def _react(self, item: EngineEvent | Committed | Lost | None) -> list[pb.GenerateEvent]:
        match item:
            case None:
                return self._heartbeat()
            case Reserved():
                return self._on_reserved(item)
            case PrefixHit():
                self._on_prefix_hit(item)
                return []
            case ReservationLost():
                self._handoff.drop()
                return []
            case Committed():
                return self._on_committed(item)
            case Lost():
                return self._on_lost(item)
            case PromptLogprobs():
                return [prompt_logprobs_event(item)]
            case TokensOut():
                return self._on_tokens(item)
            case RequestFailed():
                raise item.exception()
            case _:
                raise AssertionError(f"a decode leg never hears {item}")

    def _heartbeat(self) -> list[pb.GenerateEvent]:
        """Only a loop that turns is alive: a hung engine falls silent although gRPC answers."""
        turns = self._engine.engine.stats().turns
        if turns == self._turns_seen:
            return []
        self._turns_seen = turns
        return [pb.GenerateEvent(heartbeat=pb.Heartbeat())]

    def _on_room(self, event: Reserved | PrefixHit) -> None:
        self._note_queue(event.queue_ns, event.at_ns)
        self._num_cached_tokens = event.num_cached_tokens
        self._metrics.observe_reserved(event.queue_ns)

    def _note_queue(self, queue_ns: int, end_ns: int) -> None:
        self._timings.queue_ns += queue_ns
        self._timings.queue.begin_ns, self._timings.queue.end_ns = self._opened_ns, end_ns

    def _on_reserved(self, room: Reserved) -> list[pb.GenerateEvent]:
        self._on_room(room)
        if self._computes_rest:  # told before the engine heard of it: no KV is waited for
            return []
        self._local_reason = ""
        return [self._offer(self._handoff.begin(room.num_cached_tokens))]

    def _on_prefix_hit(self, hit: PrefixHit) -> None:
        self._on_room(hit)
        if self._request.leg is Leg.DECODE and not self._local_reason:
            # A handoff was asked for: it is not left out silently.
            self._metrics.count_local_prefill("prefix_hit")
            self._timings.local_prefill_reason = "prefix_hit"

    def _offer(self, ticket: Ticket, *, replaces_lost: bool = False) -> pb.GenerateEvent:
        self._num_tickets += 1
        self._num_asked = ticket.num_tokens - ticket.first_token
        self._ticket_ns = time.monotonic_ns()
        return pb.GenerateEvent(reserved=ticket_message(ticket, replaces_lost))

    def _on_committed(self, verdict: Committed) -> list[pb.GenerateEvent]:
        if not self._handoff.is_current(verdict):
            return []
        try:
            vocab_size = self._engine.engine.model_config.vocab_size
            commit = read_commit(verdict.commit, self._request, vocab_size)
        except BadFrame as error:
            num_tokens = len(self._request.prompt_token_ids)  # the KV itself is good
            return self._on_lost(Lost(verdict.transfer_id, error, num_tokens))
        self._handoff.ticket = None
        self._committed_ns = verdict.at_ns
        if self._num_tickets == 1:  # a later leg may hit what an earlier one has computed for us
            self._num_cached_tokens = max(self._num_cached_tokens, commit.num_cached_tokens)
        self._attach(commit.first_tokens)
        self._note_installed(verdict)
        return []

    def _note_installed(self, verdict: Committed) -> None:
        note_installed(self._timings, self._handoff.installs, verdict.report)
        handoff_ns = self._committed_ns - self._ticket_ns
        self._tails.learn(self._num_asked, handoff_ns / 1e9)
        self._metrics.observe_installed(handoff_ns, self._timings.install_ns)

    def _attach(self, first_tokens: dict[int, FirstToken]) -> None:
        """With the token 0 of each sample; without all of them, this engine samples its own."""
        samples = [one.sample for one in self._request.each()]
        name = self._request.request_id
        if all(sample in first_tokens for sample in samples):
            first, *others = samples
            rest = {sample: first_tokens[sample] for sample in others}
            self._engine.engine.attach(name, *first_tokens[first], rest)
        else:
            self._engine.engine.attach(name, None)

    def _on_lost(self, verdict: Lost) -> list[pb.GenerateEvent]:
        if not self._handoff.is_current(verdict):
            return []
        self._metrics.count_lost(verdict.error)
        # Who gives one up knows why: an answer that ended with token 0, a client that left.
        say = log.info if isinstance(verdict.error, TransferAborted) else log.warning
        say("transfer lost", error=str(verdict.error), installed=verdict.num_tokens)
        reason = self._local_reason or self._why_here(verdict.num_tokens)
        if not reason:
            return [self._offer(self._handoff.resume(verdict.num_tokens), replaces_lost=True)]
        self._local_reason, self._computes_rest = reason, True
        self._handoff.ticket = None
        self._metrics.count_local_prefill(reason)
        self._timings.local_prefill_reason = reason
        self._engine.engine.compute_rest(self._request.request_id, verdict.num_tokens)
        return []

    def _why_here(self, num_installed: int) -> str:
        """A reason to compute what is missing here, or none. Whoever wants logprobs of the prompt
        gets all of them from one side."""
        if self._request.sampling.num_prompt_logprobs:
            return ""
        num_missing = len(self._request.prompt_token_ids) - num_installed
        local_s = self._engine.engine.stats().prefill_s(num_installed, num_missing)
        return "cheaper_tail" if self._tails.is_cheaper_here(num_missing, local_s) else ""

    def _on_tokens(self, tokens: TokensOut) -> list[pb.GenerateEvent]:
        events = [self._tokens_event(tokens)] if tokens.token_ids else []
        if tokens.finish_reason is not None:
            self._num_live -= 1
            self._note_decoded(time.monotonic_ns())
            events.append(self._finished(tokens.sample, tokens.finish_reason))
        return events

    def _tokens_event(self, tokens: TokensOut) -> pb.GenerateEvent:
        is_first = not self._joined_ns
        if is_first:
            self._on_joined(tokens.scheduled_ns)
        return pb.GenerateEvent(
            tokens=pb.Tokens(
                sample=tokens.sample,
                first_index=tokens.first_index,
                token_ids=tokens.token_ids,
                num_cached_tokens=0 if tokens.first_index else self._num_cached_tokens,
                logprobs=[pb.TokenLogprobs(**entry._asdict()) for entry in tokens.logprobs],
                timings=self._timings if is_first else None,
            )
        )

    def _on_joined(self, scheduled_ns: int) -> None:
        """The first tokens are here: it is in the batch. `scheduled_ns`: as `TokensOut` has it."""
        self._joined_ns = now_ns = time.monotonic_ns()
        timings = self._timings
        if self._committed_ns:
            timings.attach_ns = now_ns - self._committed_ns
            timings.attach.begin_ns, timings.attach.end_ns = self._committed_ns, now_ns
            self._metrics.observe_attached(timings.attach_ns)
        elif scheduled_ns:  # computed here
            if not timings.HasField("queue"):
                self._note_queue(scheduled_ns - self._opened_ns, scheduled_ns)
            timings.build_ns = now_ns - scheduled_ns
            timings.build.begin_ns, timings.build.end_ns = scheduled_ns, now_ns

    def _note_decoded(self, now_ns: int) -> None:
        self._timings.decode_ns = now_ns - self._joined_ns
        self._timings.decode.begin_ns, self._timings.decode.end_ns = self._joined_ns, now_ns

    def _finished(self, sample: int, reason: FinishReason) -> pb.GenerateEvent:
        finished = pb.Finished(sample=sample, reason=_FINISH_REASONS[reason], timings=self._timings)
        return pb.GenerateEvent(finished=finished)
