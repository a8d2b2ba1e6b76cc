"""Makes an explanation of a request's record. Pure."""

from collections.abc import Sequence

from router.explanation import (
    Attempt,
    Brief,
    Candidate,
    Choice,
    ChunkTimes,
    ErrorTold,
    Explanation,
    Leg,
    Moved,
    Pair,
    Prompt,
    RankTold,
    Sample,
    StageTimes,
    WaitTimes,
    WayTold,
)
from router.leg_record import AttemptRecord, LegRecord
from router.placement import Quote
from router.policy import Verdict
from router.record import PromptRecord, RequestRecord
from router.timeline import (
    Stage,
    clock_error_ns,
    exposed,
    handoff,
    parts,
    rank_stages,
    rest,
    stages,
)


def brief(record: RequestRecord) -> Brief:
    first_ns = record.first_token_ns
    return Brief(
        id=record.request_id,
        arrived_at=record.arrived_at,
        endpoint=record.endpoint,
        model=record.model or None,
        state=record.state,
        ttft_ms=_ms(first_ns - record.read_ns) if first_ns else None,
        pair=_pair(record.prompts),
    )


def explain(record: RequestRecord, now_ns: int) -> Explanation:
    shares, behind = parts(record, now_ns), rest(record, now_ns)
    clock = _Clock(record.begin_ns)
    return Explanation(
        **brief(record).model_dump(),
        streamed=record.is_streaming,
        read_ms=clock.since(record.read_ns),
        first_byte_ms=clock.since(record.first_byte_ns),
        end_ms=clock.since(record.end_ns),
        total_ms=_ms(shares.end_ns - shares.begin_ns) if shares else None,
        parts_ms={name: _ms(ns) for name, ns in shares.ns.items()} if shares else {},
        residual_ms=_ms(shares.residual_ns) if shares else None,
        rest_ms=_ms(behind.end_ns - behind.begin_ns) if behind else None,
        rest_parts_ms={name: _ms(ns) for name, ns in behind.ns.items()} if behind else {},
        rest_residual_ms=_ms(behind.residual_ns) if behind else None,
        clock_error_ms=_ms(clock_error_ns(record)),
        error=_error(record),
        prompts=[_prompt(prompt, clock, record.read_ns) for prompt in record.prompts],
    )


class _Clock:
    """Milliseconds since the request arrived."""

    def __init__(self, begin_ns: int) -> None:
        self._begin_ns = begin_ns

    def at(self, ns: int) -> float:
        return _ms(ns - self._begin_ns)

    def since(self, ns: int) -> float | None:
        """None: it has not come."""
        return self.at(ns) if ns else None


def _ms(ns: int) -> float:
    return ns / 1e6


def _pair(prompts: Sequence[PromptRecord]) -> Pair:
    """Of the first prompt: between whom its KV went, or who is at it."""
    for prompt in prompts:
        legs = handoff(prompt)
        if legs is not None:
            return Pair(prefill=legs[0].worker, decode=legs[1].worker)
        for attempt in reversed(prompt.attempts):
            decode = attempt.decode.worker if attempt.decode is not None else None
            prefill = attempt.prefills[-1].worker if attempt.prefills else None
            return Pair(decode=decode, prefill=prefill)
    return Pair(decode=None, prefill=None)


def _error(record: RequestRecord) -> ErrorTold | None:
    if record.state in ("running", "completed"):
        return None
    return ErrorTold(
        status=record.status or None, code=record.error_code or None, message=record.error
    )


def _prompt(prompt: PromptRecord, clock: _Clock, read_ns: int) -> Prompt:
    felt = exposed(prompt)
    ttft_ns = prompt.first_token_ns - read_ns
    share = felt.ns / ttft_ns if felt is not None and prompt.first_token_ns else None
    return Prompt(
        id=prompt.request_id,
        num_tokens=prompt.num_tokens,
        num_cached_tokens=prompt.num_cached_tokens,
        first_token_ms=clock.since(prompt.first_token_ns),
        end_ms=clock.since(prompt.end_ns),
        exposed_handoff_ms=_ms(felt.ns) if felt is not None else None,
        exposed_error_ms=_ms(felt.error_ns) if felt is not None else None,
        exposed_share=share,
        waits=[
            WaitTimes(begin_ms=clock.at(wait.begin_ns), end_ms=clock.at(wait.end_ns))
            for wait in prompt.waits
        ],
        num_attempts=prompt.num_attempts,
        attempts=[_attempt(attempt, clock) for attempt in prompt.attempts],
        samples=[
            Sample(
                num_tokens=told.num_tokens,
                finish_reason=told.finish_reason.value if told.finish_reason else None,
            )
            for told in prompt.samples()
        ],
    )


def _attempt(attempt: AttemptRecord, clock: _Clock) -> Attempt:
    return Attempt(
        number=attempt.number,
        outcome=attempt.outcome or None,
        detail=attempt.detail or None,
        begin_ms=clock.at(attempt.begin_ns),
        picked_ms=clock.since(attempt.picked_ns),
        end_ms=clock.since(attempt.end_ns),
        local_prefill_reason=attempt.local_prefill_reason or None,
        choice=_choice(attempt),
        candidates=_candidates(attempt.candidates.verdicts),
        decode=_leg(attempt.decode, clock) if attempt.decode is not None else None,
        prefills=[_leg(leg, clock) for leg in attempt.prefills],
        num_left_out=attempt.num_left_out,
    )


def _choice(attempt: AttemptRecord) -> Choice | None:
    found, saved_s = attempt.placement, attempt.saved_s
    if found is None:
        return None
    return Choice(
        taken=_way(found.taken),
        other=_way(found.other) if found.other is not None else None,
        saved_ms=saved_s * 1000 if saved_s is not None else None,
    )


def _way(quote: Quote) -> WayTold:
    return WayTold(
        prefill=quote.prefill or None,
        decode=quote.decode,
        ttft_ms=quote.ttft_s * 1000,
        tpot_ms=quote.tpot_s * 1000,
        transfer_ms=quote.transfer_s * 1000,
        others_ms=quote.others_s * 1000,
        cost_ms=quote.cost_s * 1000,
    )


def _leg(leg: LegRecord, clock: _Clock) -> Leg:
    reading = leg.clock
    return Leg(
        kind=leg.kind,
        worker=leg.worker,
        address=leg.address,
        outcome=leg.outcome or None,
        detail=leg.detail or None,
        begin_ms=clock.at(leg.begin_ns),
        answered_ms=clock.since(leg.answered_ns),
        end_ms=clock.since(leg.end_ns),
        first_token=leg.first_token,
        replaces_lost=leg.replaces_lost,
        clock_offset_ms=_ms(reading.offset_ns) if reading is not None else None,
        clock_error_ms=_ms(reading.error_ns) if reading is not None else None,
        stages=_stages(stages(leg), clock),
        ranks=[
            RankTold(
                rank=told.rank,
                stages=_stages(its, clock),
                nbytes=told.kv_nbytes,
                frames=told.kv_frames,
            )
            for told, its in rank_stages(leg)
        ],
        chunks=_chunks(leg, clock),
        kv=_moved(leg),
        candidates=_candidates(leg.candidates.verdicts),
    )


def _stages(found: Sequence[Stage], clock: _Clock) -> list[StageTimes]:
    return [
        StageTimes(
            stage=stage.name,
            begin_ms=clock.at(stage.begin_ns),
            end_ms=clock.at(stage.end_ns),
            busy_ms=_ms(stage.busy_ns),
        )
        for stage in found
    ]


def _chunks(leg: LegRecord, clock: _Clock) -> list[ChunkTimes]:
    if leg.timings is None or leg.clock is None:
        return []
    return [
        ChunkTimes(
            num_computed_tokens=chunk.num_computed_tokens,
            begin_ms=clock.at(leg.clock.ours(chunk.begin_ns)),
            end_ms=clock.at(leg.clock.ours(chunk.end_ns)),
        )
        for chunk in leg.timings.chunks
    ]


def _moved(leg: LegRecord) -> Moved | None:
    timings = leg.timings
    if timings is None or not timings.kv_frames:
        return None
    is_sender = bool(timings.codec)
    return Moved(
        nbytes=timings.kv_nbytes,
        frames=timings.kv_frames,
        codec=timings.codec or None,
        transports=list(timings.transports) if is_sender else None,
        offers=timings.offers if is_sender else None,
    )


def _candidates(verdicts: Sequence[Verdict]) -> list[Candidate]:
    return [
        Candidate(
            worker=one.worker,
            load=one.load,
            num_picks=one.num_picks,
            cost_ms=one.cost_ms,
            why=one.why,
        )
        for one in verdicts
    ]
