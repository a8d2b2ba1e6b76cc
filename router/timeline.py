"""Where a request's time went, from its record: all on the router's clock, in nanoseconds. Pure.

Workers' stages are mapped by the clock reading that came with them, and are off by its error at
most; what is measured within one process is not. `parts` shares out the time from the request's
body to the first byte of its answer: at each moment to one part, or to nobody. So the parts and the
residual add up exactly, whatever overlaps and whatever is unknown.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from protos import serving_pb2 as pb
from router.clock import ClockReading
from router.leg_record import LegRecord
from router.record import PromptRecord, RequestRecord

PREFILL_STAGES = ("queue", "build", "pack", "ship")
RANK_STAGES = ("pack", "ship", "install")
DECODE_STAGES = ("queue", "build", "install", "attach", "decode")

PARTS = (
    "validate", "respond", "prefill_build", "prefill_queue", "decode_queue", "decode_build",
    "prefill_pack", "decode_install", "prefill_ship", "decode_attach", "decode_decode", "line",
    "pick", "retry", "calls",
)  # fmt: skip
"""Which of several that cover a moment it counts for: the first."""


class Stage(NamedTuple):
    """One stage of a leg."""

    name: str
    begin_ns: int
    end_ns: int
    busy_ns: int
    """Less than what is between, where it ran in pieces; more, where pieces overlapped."""


class Part(NamedTuple):
    name: str
    begin_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True)
class Shares:
    """Of [begin, end): parts that took some of it, in order of their first moment."""

    begin_ns: int
    end_ns: int
    ns: dict[str, int]
    residual_ns: int


class Exposed(NamedTuple):
    """The part of a handoff that the request felt: last chunk computed → joined the batch."""

    ns: int
    error_ns: int


def stages(leg: LegRecord) -> list[Stage]:
    """What a leg has told of; none if its worker's clock is not known."""
    timings, clock = leg.timings, leg.clock
    if timings is None or clock is None:
        return []
    names = PREFILL_STAGES if leg.kind == "prefill" else DECODE_STAGES
    found = list(_told(timings, names, clock))
    if leg.kind == "decode" and timings.HasField("queue") and not timings.HasField("decode"):
        joined_ns = found[-1].end_ns  # a leg that was ended from here does not tell of its end
        if leg.end_ns > joined_ns:
            found.append(Stage("decode", joined_ns, leg.end_ns, leg.end_ns - joined_ns))
    return found


def rank_stages(leg: LegRecord) -> list[tuple[pb.RankTimings, list[Stage]]]:
    """Each rank's part of the handoff, where a worker has several."""
    timings, clock = leg.timings, leg.clock
    if timings is None or clock is None:
        return []
    return [(rank, list(_told(rank, RANK_STAGES, clock))) for rank in timings.ranks]


def _told(
    timings: pb.Timings | pb.RankTimings, names: Sequence[str], clock: ClockReading
) -> Iterator[Stage]:
    for name in names:
        if timings.HasField(name):  # type: ignore[arg-type]
            span: pb.Span = getattr(timings, name)
            begin_ns, end_ns = clock.ours(span.begin_ns), clock.ours(span.end_ns)
            yield Stage(name, begin_ns, end_ns, getattr(timings, f"{name}_ns"))


def parts(record: RequestRecord, now_ns: int) -> Shares | None:
    """Of the time from the request's body to the first byte of the answer, or to its end, or to
    now, if there is none; None before there is a body."""
    end_ns = record.first_byte_ns or record.end_ns or now_ns
    if not record.read_ns:
        return None
    return share_out(record.read_ns, end_ns, list(_parts(record, end_ns)))


def rest(record: RequestRecord, now_ns: int) -> Shares | None:
    """Of the time behind that: from the first byte of the answer to its end, or to now. None while
    there is no first byte."""
    begin_ns, end_ns = record.first_byte_ns, record.end_ns or now_ns
    if not begin_ns:
        return None
    # Until a stream ends each of its tokens is written as it comes: nothing of it is `respond`.
    found = [part for part in _parts(record, end_ns) if part.name != "respond"]
    return share_out(begin_ns, max(begin_ns, end_ns), found)


def share_out(begin_ns: int, end_ns: int, found: Sequence[Part]) -> Shares:
    """Each moment of [begin, end) to the first of PARTS that covers it."""
    rank = {name: index for index, name in enumerate(PARTS)}
    inside = [
        Part(part.name, max(part.begin_ns, begin_ns), min(part.end_ns, end_ns)) for part in found
    ]
    inside = sorted((p for p in inside if p.begin_ns < p.end_ns), key=lambda p: rank[p.name])
    cuts = sorted({begin_ns, end_ns, *(p.begin_ns for p in inside), *(p.end_ns for p in inside)})
    shares: dict[str, int] = {}
    for low, high in pairwise(cuts):
        owner = next((p.name for p in inside if p.begin_ns <= low and high <= p.end_ns), None)
        if owner is not None:
            shares[owner] = shares.get(owner, 0) + high - low
    return Shares(begin_ns, end_ns, shares, end_ns - begin_ns - sum(shares.values()))


def stage_times(record: RequestRecord) -> Iterator[tuple[str, int]]:
    """What each stage took, however often it ran."""
    if record.validated_ns:
        yield "validate", record.validated_ns - record.read_ns
    for prompt in record.prompts:
        yield from (("line", wait.end_ns - wait.begin_ns) for wait in prompt.waits)
        for leg in legs_of(prompt):
            yield from ((f"{leg.kind}_{stage.name}", stage.busy_ns) for stage in stages(leg))


def clock_error_ns(record: RequestRecord) -> int:
    """Of the worst clock that the timeline stands on."""
    legs = [leg for prompt in record.prompts for leg in legs_of(prompt)]
    return max((leg.clock.error_ns for leg in legs if leg.clock is not None), default=0)


def legs_of(prompt: PromptRecord) -> Iterator[LegRecord]:
    for attempt in prompt.attempts:
        yield from attempt.legs


def handoff(prompt: PromptRecord) -> tuple[LegRecord, LegRecord] | None:
    """The prefill and the decode leg between which the prompt's KV went, once it has."""
    for attempt in reversed(prompt.attempts):
        decode = attempt.decode
        if decode is not None and decode.timings is not None and decode.timings.kv_frames:
            built = [leg for leg in attempt.prefills if _has(leg, "build")]
            return (built[-1], decode) if built else None
    return None


def exposed(prompt: PromptRecord) -> Exposed | None:
    """None if nothing was handed over, or a clock is not known."""
    legs = handoff(prompt)
    if legs is None:
        return None
    prefill, decode = legs
    built = next((stage for stage in stages(prefill) if stage.name == "build"), None)
    attached = next((stage for stage in stages(decode) if stage.name == "attach"), None)
    if built is None or attached is None or prefill.clock is None or decode.clock is None:
        return None
    error_ns = prefill.clock.error_ns + decode.clock.error_ns
    return Exposed(max(0, attached.end_ns - built.end_ns), error_ns)


def _has(leg: LegRecord, stage: str) -> bool:
    return any(found.name == stage for found in stages(leg))


def _parts(record: RequestRecord, end_ns: int) -> Iterator[Part]:
    yield Part("validate", record.read_ns, record.validated_ns)
    for prompt in record.prompts:
        yield from _parts_of_prompt(prompt, end_ns)
    spoke = record.first_token_ns
    if not record.is_streaming:
        spoke = max((prompt.end_ns for prompt in record.prompts), default=0)
    if spoke:
        yield Part("respond", spoke, end_ns)


def _parts_of_prompt(prompt: PromptRecord, end_ns: int) -> Iterator[Part]:
    for wait in prompt.waits:
        yield Part("line", wait.begin_ns, wait.end_ns)
    for attempt in prompt.attempts:
        yield Part("pick", attempt.begin_ns, attempt.picked_ns)
        is_lost = attempt.outcome not in ("", "done")
        yield from _parts_of_legs(attempt.legs, is_lost, end_ns)


def _parts_of_legs(legs: Iterable[LegRecord], is_lost: bool, end_ns: int) -> Iterator[Part]:
    for leg in legs:
        for stage in stages(leg):
            yield Part(f"{leg.kind}_{stage.name}", stage.begin_ns, stage.end_ns)
        has_failed = is_lost or leg.outcome not in ("", "done", "cancelled")
        yield Part("retry" if has_failed else "calls", leg.begin_ns, leg.end_ns or end_ns)
