"""One attempt at a prompt: a `Generate` stream and the prefill legs that its tickets ask for.

1. The stream opens with the tokens delivered so far; it is the lease on the decode worker.
2. `Reserved` starts a prefill leg (not in a local prefill), whose token 0 goes out at once.
3. Tokens are delivered until every sample has `Finished`, or until nothing more is wanted.

Whatever ends the attempt, both sides are cancelled and awaited before `run_attempt` returns.
"""

import asyncio

from protos import serving_pb2 as pb
from router.early_end import EarlyEnds
from router.errors import LegFailed
from router.event_stream import read_events
from router.leg_record import LegRecord
from router.messages import FINISH_REASONS, generate_request, prompt_logprobs, token_logprobs
from router.prefill_leg import PrefillLegs
from router.progress import Progress
from router.tasks import cancel_and_wait
from router.workers import DecodeWorker


async def run_attempt(
    decode: DecodeWorker,
    progress: Progress,
    legs: PrefillLegs,
    *,
    local_prefill_reason: str | None,
    inactivity_s: float,
) -> None:
    """Returns when the prompt is finished. Raises LegFailed (of the decode leg), Reopen,
    BadRequest."""
    request = generate_request(progress, local_prefill_reason)
    leg = progress.record.leg("decode", decode)
    stream = asyncio.create_task(_run_stream(decode, request, progress, legs, leg, inactivity_s))
    try:
        await asyncio.wait({stream, legs.outcome}, return_when=asyncio.FIRST_COMPLETED)
        (stream if stream.done() else legs.outcome).result()
    finally:
        try:
            await cancel_and_wait(stream)
        finally:  # cancelled once more: the leg must not be forgotten
            await legs.close()


async def _run_stream(
    decode: DecodeWorker,
    request: pb.GenerateRequest,
    progress: Progress,
    legs: PrefillLegs,
    leg: LegRecord,
    inactivity_s: float,
) -> None:
    with leg.running():
        await _read_stream(decode, request, progress, legs, leg, inactivity_s)


async def _read_stream(
    decode: DecodeWorker,
    request: pb.GenerateRequest,
    progress: Progress,
    legs: PrefillLegs,
    leg: LegRecord,
    inactivity_s: float,
) -> None:
    call = decode.stub.Generate(request, timeout=progress.remaining_s + 1)
    early_ends = EarlyEnds(decode, progress)
    try:
        async with read_events(decode, call, inactivity_s) as events:
            while not progress.is_finished:
                await _take(await events.next(), decode, progress, legs, leg, early_ends)
    finally:
        await early_ends.close()


async def _take(
    event: pb.GenerateEvent,
    decode: DecodeWorker,
    progress: Progress,
    legs: PrefillLegs,
    leg: LegRecord,
    early_ends: EarlyEnds,
) -> None:
    kind = event.WhichOneof("event")
    if kind == "tokens":
        _take_tokens(event.tokens, decode, progress, leg)
        early_ends.note_tokens(event.tokens.sample)
    elif kind == "reserved":
        leg.answered()
        await legs.start(event.reserved)
    elif kind == "prompt_logprobs":
        progress.accept_prompt(*prompt_logprobs(event.prompt_logprobs))
    elif kind == "finished":
        if event.finished.HasField("timings"):
            leg.told(event.finished.timings, decode)
        reason = FINISH_REASONS[event.finished.reason]
        if reason is None:
            raise LegFailed(decode.name, "finished_without_reason")
        early_ends.note_finished(event.finished.sample)
        progress.sample(event.finished.sample).finish(reason)
        if progress.has_ended and not progress.is_finished:
            await legs.tell_prompt()


def _take_tokens(
    tokens: pb.Tokens, decode: DecodeWorker, progress: Progress, leg: LegRecord
) -> None:
    if leg.timings is None and tokens.HasField("timings"):
        leg.told(tokens.timings, decode)
        progress.record.attempt.told(tokens.timings.local_prefill_reason)
    progress.note_cached(tokens.num_cached_tokens)
    logprobs = [token_logprobs(entry) for entry in tokens.logprobs]
    sample = progress.sample(tokens.sample)
    sample.accept(tokens.first_index, list(tokens.token_ids), logprobs=logprobs)
