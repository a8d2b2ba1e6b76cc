"""What the router remembers of a request: written as it proceeds, read by whoever explains it.

No prompt text, no token ids: names, numbers, times and reasons. All times are time.monotonic_ns of
this process; what workers tell is kept as they told it, with the clock reading of that moment
(router/clock.py). A record has an end: of very many legs only the first and the last are kept, and
`Records` keeps the last requests, bounded in number and bytes.

1. `Records.open` when the request comes; `read`, `validated`, `answering` and `ended` as it goes.
2. Each prompt has a `PromptRecord`; dispatch opens an `AttemptRecord` for each attempt at it, and
   a `LegRecord` for each call to a worker.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http import HTTPStatus
from typing import NamedTuple

from router.errors import CLIENT_CLOSED_REQUEST, ApiError
from router.leg_record import (
    MAX_TEXT,
    UNJUDGED,
    AttemptRecord,
    Judgement,
    Kind,
    LegRecord,
    reason_of,
)
from router.objective import NO_WISH
from router.request import FinishReason, RequestId, ValidPrompt, ValidRequest
from router.tenant import EVERYBODY, Grant
from router.workers import Worker

MAX_ATTEMPTS = 12
"""Of a prompt, and legs of an attempt: the first ones and the last one are kept beyond it."""
MAX_LEGS = 128
"""Of a request."""
MAX_NBYTES = 64 << 20
"""Of all records, by estimate."""


class SampleTold(NamedTuple):
    num_tokens: int
    finish_reason: FinishReason | None


class Wait(NamedTuple):
    """In the router: for its turn (router/lobby.py), or for a prefill queue with room."""

    begin_ns: int
    end_ns: int


class PromptRecord:
    """One prompt of a request."""

    def __init__(self, request_id: str, num_tokens: int, parent: "RequestRecord") -> None:
        self.request_id = request_id
        self.num_tokens = num_tokens
        self.attempts: list[AttemptRecord] = []
        self.num_attempts = 0
        self.waits: list[Wait] = []
        self.waited_s = 0.0
        """All of them together."""
        self.num_cached_tokens = 0
        self.first_token_ns = 0
        self.end_ns = 0
        self.samples: Callable[[], Sequence[SampleTold]] = tuple
        """What they have said so far."""
        self._parent = parent

    @property
    def is_kept(self) -> bool:
        """Somebody may read it: it is worth asking what the others scored."""
        return self._parent.is_kept

    @property
    def attempt(self) -> AttemptRecord:
        """The present one."""
        return self.attempts[-1]

    def first_token(self, now_ns: int) -> None:
        self.first_token_ns = self.first_token_ns or now_ns

    def ended(self) -> None:
        self.end_ns = time.monotonic_ns()

    def waited(self, begin_ns: int) -> None:
        """Until now."""
        wait = Wait(begin_ns, time.monotonic_ns())
        self.waited_s += (wait.end_ns - wait.begin_ns) / 1e9
        if len(self.waits) < MAX_ATTEMPTS:
            self.waits.append(wait)
        else:
            self.waits[-1] = Wait(self.waits[-1].begin_ns, wait.end_ns)

    @contextmanager
    def attempting(self) -> Iterator[AttemptRecord]:
        self.num_attempts += 1
        attempt = AttemptRecord(self.num_attempts, time.monotonic_ns())
        if len(self.attempts) == MAX_ATTEMPTS:
            del self.attempts[-1]
        self.attempts.append(attempt)
        try:
            yield attempt
        except BaseException as error:
            attempt.ended(*reason_of(error))
            raise
        attempt.ended("done")

    def leg(
        self,
        kind: Kind,
        worker: Worker,
        candidates: Judgement = UNJUDGED,
        *,
        first_token: int = 0,
        replaces_lost: bool = False,
    ) -> LegRecord:
        """A call of the present attempt that is about to begin."""
        leg = LegRecord(
            kind,
            worker.name,
            worker.address,
            worker.status.generation,
            time.monotonic_ns(),
            candidates,
            first_token,
            replaces_lost,
        )
        attempt = self.attempt
        if kind == "decode":
            attempt.decode = leg
            return leg
        if len(attempt.prefills) == MAX_ATTEMPTS or not self._parent.takes_leg():
            attempt.num_left_out += len(attempt.prefills[-1:])
            del attempt.prefills[-1:]
        attempt.prefills.append(leg)
        return leg


class RequestRecord:
    """One POST."""

    def __init__(self, request_id: RequestId, endpoint: str, *, is_kept: bool) -> None:
        self.request_id = request_id
        self.endpoint = endpoint
        self.is_kept = is_kept
        self.model = ""
        self.session = ""
        """Of its head; not told."""
        self.grant = EVERYBODY
        self.wish = NO_WISH
        """Of its head."""
        self.is_streaming = False
        self.arrived_at = time.time()
        """For people: seconds since 1970."""
        self.begin_ns = time.monotonic_ns()
        self.read_ns = self.validated_ns = self.first_byte_ns = self.end_ns = 0
        self.state = "running"
        self.status = 0
        self.error = ""
        self.error_code = ""
        self.prompts: list[PromptRecord] = []
        self.on_end: Callable[[RequestRecord], None] = lambda record: None
        self._num_legs = 0

    def read(self) -> None:
        """The body is here."""
        self.read_ns = time.monotonic_ns()

    def validated(self, request: ValidRequest, model: str) -> None:
        self.validated_ns = time.monotonic_ns()
        self.model, self.is_streaming = model, request.is_streaming
        self.prompts = [
            PromptRecord(prompt.request_id, len(prompt.token_ids), self)
            for prompt in request.prompts
        ]

    def answering(self) -> None:
        """The first byte of the answer's body is handed to the connection."""
        self.first_byte_ns = self.first_byte_ns or time.monotonic_ns()

    def ended(self, state: str, error: BaseException | None = None) -> None:
        self.end_ns, self.state = time.monotonic_ns(), state
        if isinstance(error, ApiError):
            self.status, self.error_code = error.status, error.code or ""
        elif state == "cancelled":
            self.status = CLIENT_CLOSED_REQUEST
        else:
            self.status = HTTPStatus.OK if error is None else HTTPStatus.INTERNAL_SERVER_ERROR
        if error is not None:
            self.error = str(error)[:MAX_TEXT]
        self.on_end(self)

    def takes_leg(self) -> bool:
        self._num_legs += 1
        return self._num_legs <= MAX_LEGS

    @property
    def ttft_s(self) -> float | None:
        """From the body to the first token; None: there was none."""
        return (self.first_token_ns - self.read_ns) / 1e9 if self.first_token_ns else None

    @property
    def first_token_ns(self) -> int:
        """Of the prompt that spoke first; 0 if none has."""
        return min((p.first_token_ns for p in self.prompts if p.first_token_ns), default=0)

    @property
    def nbytes(self) -> int:
        """In memory, roughly (tests/router/test_record.py holds it against the truth)."""
        total = 2000
        for prompt in self.prompts:
            total += 1000 + 100 * len(prompt.waits)
            for attempt in prompt.attempts:
                total += 500 + 150 * attempt.candidates.num_kept
                for leg in attempt.legs:
                    num_chunks = len(leg.timings.chunks) if leg.timings is not None else 0
                    total += 1500 + 150 * leg.candidates.num_kept + 64 * num_chunks
        return total


def unkept(prompt: ValidPrompt) -> PromptRecord:
    """Of a prompt whose request nobody records."""
    request = RequestRecord(prompt.request_id, "", is_kept=False)
    return PromptRecord(prompt.request_id, len(prompt.token_ids), request)


class Records:
    """The last requests, by id; those that still run among them."""

    def __init__(self, max_requests: int, max_nbytes: int = MAX_NBYTES) -> None:
        self._max_requests = max_requests
        self._max_nbytes = max_nbytes
        self._nbytes = 0
        self._by_id: OrderedDict[str, RequestRecord] = OrderedDict()
        self._sizes: dict[str, int] = {}  # of those that have ended

    def open(self, request_id: RequestId, endpoint: str) -> RequestRecord:
        record = RequestRecord(request_id, endpoint, is_kept=self._max_requests > 0)
        if record.is_kept:
            record.on_end = self._close
            self._by_id[request_id] = record
            self._fit()
        return record

    def get(self, request_id: str) -> RequestRecord | None:
        return self._by_id.get(request_id)

    def of(self, grant: Grant) -> "TenantRecords":
        return TenantRecords(self, None if grant.is_operator else grant.tenant.name)

    def newest_first(self) -> Iterator[RequestRecord]:
        return reversed(self._by_id.values())

    def __len__(self) -> int:
        return len(self._by_id)

    def _close(self, record: RequestRecord) -> None:
        """It has ended: it grows no more."""
        if self._by_id.get(record.request_id) is record:
            self._sizes[record.request_id] = record.nbytes
            self._nbytes += record.nbytes
            self._fit()

    def _fit(self) -> None:
        while len(self._by_id) > self._max_requests or self._nbytes > self._max_nbytes:
            oldest, _ = self._by_id.popitem(last=False)
            self._nbytes -= self._sizes.pop(oldest, 0)


class TenantRecords:
    """Those of one tenant, for nobody sees another's; of all, if none is named."""

    def __init__(self, records: Records, tenant: str | None) -> None:
        self._records = records
        self._tenant = tenant

    def get(self, request_id: str) -> RequestRecord | None:
        record = self._records.get(request_id)
        return record if record is not None and self._is_ours(record) else None

    def newest_first(self) -> Iterator[RequestRecord]:
        return filter(self._is_ours, self._records.newest_first())

    def _is_ours(self, record: RequestRecord) -> bool:
        return self._tenant in (None, record.grant.tenant.name)
