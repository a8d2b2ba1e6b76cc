"""What the router remembers of one attempt at a prompt, and of each call to a worker.

Parts of router/record.py, which says what all of it is for.
"""

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

from protos import serving_pb2 as pb
from router.clock import ClockReading
from router.errors import ApiError, LegFailed, QueueFull, Reopen
from router.placement import Placement
from router.policy import Verdict
from router.workers import Worker

MAX_CANDIDATES = 8
MAX_CHUNKS = 128
MAX_RANKS = 64
MAX_TEXT = 300

Kind = Literal["prefill", "decode"]


@dataclass(frozen=True, slots=True)
class Judgement:
    """What the workers scored that could have been picked (router/judging.py)."""

    num: int
    """Of them."""
    judge: Callable[[], Sequence[Verdict]]
    """The taken one first, then the others by what they scored."""

    @property
    def num_kept(self) -> int:
        return min(self.num, MAX_CANDIDATES)

    @property
    def verdicts(self) -> Sequence[Verdict]:
        return self.judge()[:MAX_CANDIDATES]


UNJUDGED = Judgement(0, tuple)


@dataclass(slots=True)
class LegRecord:
    """One call to a worker."""

    kind: Kind
    worker: str
    address: str
    generation: int
    begin_ns: int
    candidates: Judgement = UNJUDGED
    first_token: int = 0
    """Of a prefill leg: KV of the prompt from here on was asked for."""
    replaces_lost: bool = False
    end_ns: int = 0
    """0 is not yet, here and in the others."""
    outcome: str = ""
    """`done`, or why it ended otherwise."""
    detail: str = ""
    answered_ns: int = 0
    """First event that is more than a sign of life: a ticket, or tokens."""
    timings: pb.Timings | None = None
    clock: ClockReading | None = None

    def answered(self) -> None:
        self.answered_ns = self.answered_ns or time.monotonic_ns()

    def told(self, timings: pb.Timings, worker: Worker) -> None:
        """The newest timings are the fullest."""
        self.answered()
        self.timings, self.clock = timings, worker.clock.at(time.monotonic_ns())
        del timings.chunks[MAX_CHUNKS:], timings.transports[8:], timings.ranks[MAX_RANKS:]

    @contextmanager
    def running(self) -> Iterator[None]:
        """The call's life."""
        try:
            yield
        except BaseException as error:
            self.outcome, self.detail = reason_of(error)
            raise
        else:
            self.outcome = "done"
        finally:
            self.end_ns = time.monotonic_ns()


@dataclass(slots=True)
class AttemptRecord:
    """One pair of workers, or one prefill worker alone, at one prompt."""

    number: int
    begin_ns: int
    picked_ns: int = 0
    candidates: Judgement = UNJUDGED
    """Decode workers."""
    placement: Placement | None = None
    """What was predicted, if anything was."""
    saved_s: float | None = None
    """What disaggregation gained, by that and by what came; negative: it cost, or would have."""
    local_prefill_reason: str = ""
    """Why decode computed the prompt or the rest of it: the router's reason, or decode's own."""
    decode: LegRecord | None = None
    prefills: list[LegRecord] = field(default_factory=list)
    num_left_out: int = 0
    """Prefill legs that are not kept."""
    end_ns: int = 0
    outcome: str = ""
    detail: str = ""

    def picked(self, candidates: Judgement, local_prefill_reason: str | None) -> None:
        self.picked_ns = time.monotonic_ns()
        self.candidates = candidates
        self.local_prefill_reason = local_prefill_reason or ""

    def told(self, local_prefill_reason: str) -> None:
        """By decode: what it has chosen itself, if anything."""
        self.local_prefill_reason = self.local_prefill_reason or local_prefill_reason[:MAX_TEXT]

    def ended(self, outcome: str, detail: str = "") -> None:
        self.end_ns, self.outcome, self.detail = time.monotonic_ns(), outcome, detail

    @property
    def legs(self) -> Iterator[LegRecord]:
        if self.decode is not None:
            yield self.decode
        yield from self.prefills


def reason_of(error: BaseException) -> tuple[str, str]:
    """A word and a detail."""
    match error:
        case LegFailed():
            return error.reason, error.detail[:MAX_TEXT]
        case QueueFull():
            return "queue_full", f"retry after {error.retry_after_s:g} s"
        case Reopen():
            return error.reason, ""
        case ApiError():
            return error.code or "refused", error.message[:MAX_TEXT]
        case asyncio.CancelledError():
            return "cancelled", ""
        case _:
            return type(error).__name__, str(error)[:MAX_TEXT]
