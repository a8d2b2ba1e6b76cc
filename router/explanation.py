"""What `GET /v1/requests/{id}` says of a request: its record as JSON (docs/handoff.md reads one).

Times are milliseconds, on the router's clock, since the request arrived; a null is not there, or
not yet. `parts_ms` and `residual_ms` add up to `total_ms`. What comes from a worker's clock is off
by that leg's `clock_error_ms` at most. router/explain.py fills these in.
"""

from typing import Literal

from pydantic import BaseModel


class Candidate(BaseModel):
    """A worker that could have been picked. Lower scores win: load, then picks."""

    worker: str
    load: int
    num_picks: int
    cost_ms: float | None
    """Predicted, and compared before the load; null: it was not."""
    why: str


class StageTimes(BaseModel):
    stage: str
    begin_ms: float
    end_ms: float
    busy_ms: float
    """Less than from begin to end where it ran in pieces; more where pieces overlapped."""


class ChunkTimes(BaseModel):
    num_computed_tokens: int
    begin_ms: float
    end_ms: float


class Moved(BaseModel):
    """KV that a leg shipped or received."""

    nbytes: int
    frames: int
    codec: str | None
    transports: list[str] | None
    """What the connection really uses. Told by the sender, as codec and offers."""
    offers: int | None


class RankTold(BaseModel):
    """One rank's part of a handoff."""

    rank: int
    stages: list[StageTimes]
    nbytes: int
    frames: int


class Leg(BaseModel):
    """One call to a worker."""

    kind: Literal["prefill", "decode"]
    worker: str
    address: str
    outcome: str | None
    """`done`, `cancelled` (the rest was not needed), or what went wrong; null: it runs."""
    detail: str | None
    begin_ms: float
    answered_ms: float | None
    """The first ticket or token came."""
    end_ms: float | None
    first_token: int
    """KV of the prompt was asked for from here on; what is before it was cached on decode."""
    replaces_lost: bool
    """The transfer before this one was lost."""
    clock_offset_ms: float | None
    clock_error_ms: float | None
    stages: list[StageTimes]
    """With several ranks: from the first one's begin to the last one's end, as busy as the
    busiest."""
    ranks: list[RankTold]
    """Empty: the worker has one, or has not told yet."""
    chunks: list[ChunkTimes]
    kv: Moved | None
    candidates: list[Candidate]


class WayTold(BaseModel):
    """What was predicted of one way to compute a prompt."""

    prefill: str | None
    """Null: decode alone. Addresses, as the next."""
    decode: str
    ttft_ms: float
    tpot_ms: float
    transfer_ms: float
    """What would be felt of the handoff."""
    others_ms: float
    """What others would wait for it, summed."""
    cost_ms: float


class Choice(BaseModel):
    taken: WayTold
    other: WayTold | None
    """The best of the way not taken: remote or local."""
    saved_ms: float | None
    """What disaggregation gained, by what came and by what was predicted of the other way;
    negative: it cost, or would have."""


class Attempt(BaseModel):
    number: int
    outcome: str | None
    detail: str | None
    begin_ms: float
    picked_ms: float | None
    end_ms: float | None
    local_prefill_reason: str | None
    choice: Choice | None
    """Null: not enough was known to predict."""
    candidates: list[Candidate]
    decode: Leg | None
    prefills: list[Leg]
    num_left_out: int


class Sample(BaseModel):
    num_tokens: int
    finish_reason: Literal["stop", "length"] | None


class WaitTimes(BaseModel):
    begin_ms: float
    end_ms: float


class Prompt(BaseModel):
    id: str
    num_tokens: int
    num_cached_tokens: int
    first_token_ms: float | None
    end_ms: float | None
    exposed_handoff_ms: float | None
    """From the last chunk computed to joining decode's batch."""
    exposed_error_ms: float | None
    exposed_share: float | None
    """Of the time to the first token."""
    waits: list[WaitTimes]
    num_attempts: int
    attempts: list[Attempt]
    samples: list[Sample]


class ErrorTold(BaseModel):
    status: int | None
    code: str | None
    message: str


class Pair(BaseModel):
    decode: str | None
    prefill: str | None


class Brief(BaseModel):
    """A line of `GET /v1/requests`."""

    id: str
    object: Literal["request"] = "request"
    arrived_at: float
    """Seconds since 1970."""
    endpoint: str
    model: str | None
    state: str
    """`running`, or the outcome as baton_requests_total counts it."""
    ttft_ms: float | None
    pair: Pair


class Explanation(Brief):
    streamed: bool
    read_ms: float | None
    """The body was here: parts and TTFT count from this moment on."""
    first_byte_ms: float | None
    end_ms: float | None
    total_ms: float | None
    """From the body to the first byte of the answer, or its end, or now."""
    parts_ms: dict[str, float]
    residual_ms: float | None
    rest_ms: float | None
    """Behind that: from the first byte of the answer to its end, or now. Its parts and its residual
    add up to it in the same way."""
    rest_parts_ms: dict[str, float]
    rest_residual_ms: float | None
    clock_error_ms: float
    """Of the worst clock that the parts stand on."""
    error: ErrorTold | None
    prompts: list[Prompt]


class RequestList(BaseModel):
    object: Literal["list"] = "list"
    data: list[Brief]
