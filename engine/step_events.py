"""What an engine tells of a step: pure functions from what was computed to `EngineEvent`s."""

from collections.abc import Iterable, Mapping

from engine.request import (
    ChunkComputed,
    EngineEvent,
    FirstToken,
    LayersComputed,
    PrefixHit,
    ReservationLost,
    Reserved,
    TokenLogprobs,
    TokensOut,
)
from engine.scheduled_batch import Computed, ScheduledBatch, StepOutput
from engine.sequence import Sequence


def events_before_step(batch: ScheduledBatch, now_ns: int) -> list[EngineEvent]:
    """Room lost and found, prefixes found. A request that lost room may have found it again; one
    that was preempted finds what it has computed itself, which is no news."""
    return [
        *(ReservationLost(seq.request_id) for seq in batch.lost),
        *(
            Reserved(seq.request_id, now_ns - seq.submitted_ns, seq.num_cached_tokens, now_ns)
            for seq in batch.reserved
        ),
        *(
            PrefixHit(seq.request_id, seq.num_cached_tokens, now_ns - seq.submitted_ns, now_ns)
            for seq in batch.hits
            if not seq.was_preempted
        ),
    ]


def last_chunks(batch: ScheduledBatch) -> list[Sequence]:
    """Those whose KV is copied, and whose prompt this step completes."""
    return [
        seq
        for seq in batch.seqs
        if seq.is_prefill_leg
        and seq.lease is not None
        and seq.num_computed_tokens + seq.num_scheduled_tokens == seq.num_prompt_tokens
    ]


def events_of_layers(ends: Iterable[Sequence], num_layers: int) -> list[EngineEvent]:
    return [LayersComputed(seq.request_id, seq.num_prompt_tokens, num_layers) for seq in ends]


def events_after_step(
    computed: Iterable[Computed], output: StepOutput, begin_ns: int, now_ns: int
) -> list[EngineEvent]:
    """Of a step that began at `begin_ns`. A prompt's logprobs come before anything else of it, a
    prefill leg's last chunk before its token."""
    events: list[EngineEvent] = [*output.prompt_logprobs]
    logprobs = iter(output.logprobs)
    for done in computed:
        if done.seq.is_prefill_leg and done.num_tokens:
            events.append(_chunk(done, begin_ns, now_ns))
        if done.token_id is not None:
            events.append(token_out(done.seq, done.token_id, next(logprobs, None)))
    return events


def events_after_attach(
    samples: Iterable[Sequence], first: FirstToken, others: Mapping[int, FirstToken]
) -> list[EngineEvent]:
    """The token 0 of each, the first one's is `first`; none if outputs were delivered before."""
    leader, *forks = samples
    if any(seq.request.output_token_ids for seq in (leader, *forks)):
        return []
    tokens = ((seq, others[seq.request.sample]) for seq in forks)
    return [token_out(seq, *token) for seq, token in ((leader, first), *tokens)]


def token_out(seq: Sequence, token_id: int, logprobs: TokenLogprobs | None) -> TokensOut:
    """`token_id`, which `seq` ends in now."""
    return TokensOut(
        seq.request_id,
        seq.num_output_tokens - 1,
        (token_id,),
        seq.finish_reason,
        (logprobs,) if logprobs is not None else (),
        seq.request.sample,
        seq.first_scheduled_ns,
    )


def last_word(seq: Sequence) -> TokensOut:
    """It was ended from outside: no token comes with that."""
    index, sample = seq.num_output_tokens, seq.request.sample
    return TokensOut(seq.request_id, index, (), seq.finish_reason, sample=sample)


def _chunk(done: Computed, begin_ns: int, now_ns: int) -> ChunkComputed:
    seq = done.seq
    num_computed = done.first_position + done.num_tokens
    return ChunkComputed(
        request_id=seq.request_id,
        num_computed_tokens=num_computed,
        is_last=num_computed == seq.num_prompt_tokens,
        queue_ns=seq.first_scheduled_ns - seq.submitted_ns,
        build_ns=now_ns - seq.first_scheduled_ns,
        begin_ns=begin_ns,
        at_ns=now_ns,
    )
