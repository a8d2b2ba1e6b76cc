"""What the router measures, as a client would: times per prompt, outcomes per request.

Base units; one registry per app. `track_request` counts a whole POST, a `TokenTimer` one sample.
"""

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http import HTTPStatus

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from router.errors import ApiError, Disconnected
from router.latency import RecentLatency
from router.record import RequestRecord
from router.stage_metrics import DisaggregationMetrics, StageMetrics
from router.workers import Worker, WorkerSet
from runtime.log import get_logger
from runtime.metrics import ITL_SECONDS, REQUEST_SECONDS, TTFT_SECONDS

log = get_logger()


class RouterMetrics:
    def __init__(self, registry: CollectorRegistry, workers: WorkerSet) -> None:
        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(name, text, registry=registry, buckets=buckets)

        def counter(name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(name, text, labels, registry=registry)

        self.time_to_first_token = histogram(
            "baton_time_to_first_token_seconds",
            "From the arrival of a request to the first output token of a sample.",
            TTFT_SECONDS,
        )
        self.time_per_output_token = histogram(
            "baton_time_per_output_token_seconds",
            "Per sample: time from its first to its last output token, by the tokens after the "
            "first.",
            ITL_SECONDS,
        )
        self.inter_token_latency = histogram(
            "baton_inter_token_latency_seconds",
            "Between two deliveries of output tokens of a sample.",
            ITL_SECONDS,
        )
        self.request_duration = histogram(
            "baton_request_duration_seconds",
            "Whole requests, whatever their outcome.",
            REQUEST_SECONDS,
        )
        self.requests = counter(
            "baton_requests_total",
            "Requests by outcome: completed, rejected (the client's error), cancelled (the client "
            "left), overloaded (429), unavailable, timeout, failed.",
            ("outcome",),
        )
        self.in_flight = Gauge(
            "baton_requests_in_flight", "Requests being served.", registry=registry
        )
        self.retries = counter(
            "baton_retries_total",
            "Legs that failed or had to be opened again, by reason.",
            ("leg", "reason"),
        )
        self.migrations = counter(
            "baton_migrations_total",
            "Answers that went on at another worker, by why they left the one before.",
            ("reason",),
        )
        self.local_prefills = counter(
            "baton_local_prefills_total",
            "Prompts sent to a decode worker alone, by reason.",
            ("reason",),
        )
        text = "Prompt tokens of requests."
        self.prompt_tokens = counter("baton_request_prompt_tokens_total", text)
        text = "Output tokens delivered."
        self.output_tokens = counter("baton_request_output_tokens_total", text)
        self.disaggregation = DisaggregationMetrics(registry)
        self._stages = StageMetrics(registry)
        self.recent = RecentLatency()
        _watch_workers(registry, workers)

    def count_retry(self, leg: str, reason: str) -> None:
        self.retries.labels(leg, reason).inc()

    @contextmanager
    def track_request(self, record: RequestRecord) -> Iterator[None]:
        """Counts one request and logs its end; the exception that ends it tells the outcome."""
        started = time.monotonic()
        outcome, failure = "completed", None
        self.in_flight.inc()
        try:
            yield
        except BaseException as error:
            outcome, failure = _outcome(error), error
            raise
        finally:
            self.in_flight.dec()
            self.requests.labels(outcome).inc()
            seconds = time.monotonic() - started
            self.request_duration.observe(seconds)
            record.ended(outcome, failure)
            told = self._stages.observe(record)
            status, seconds = int(record.status), round(seconds, 3)
            log.info("request ended", outcome=outcome, status=status, seconds=seconds, **told)


class TokenTimer:
    """Times of one sample's output tokens, as they reach the router."""

    def __init__(
        self,
        metrics: RouterMetrics,
        arrived: float,
        on_first: Callable[[int], None] = lambda now_ns: None,
    ) -> None:
        """`arrived`: when its request was read, by time.monotonic. `on_first` hears when the first
        token came, in nanoseconds of the same clock."""
        self._metrics = metrics
        self._on_first = on_first
        self._arrived = self._first = self._last = arrived
        self._num_tokens = 0

    def tokens(self, count: int) -> None:
        now = time.monotonic()
        if self._num_tokens == 0:
            self._first = now
            self._on_first(round(now * 1e9))
            self._metrics.time_to_first_token.observe(now - self._arrived)
            self._metrics.recent.ttft.note(now, now - self._arrived)
        else:
            self._metrics.inter_token_latency.observe(now - self._last)
        self._last = now
        self._num_tokens += count
        self._metrics.output_tokens.inc(count)

    def finished(self) -> None:
        if self._num_tokens > 1:
            per_token = (self._last - self._first) / (self._num_tokens - 1)
            self._metrics.time_per_output_token.observe(per_token)
            self._metrics.recent.tpot.note(self._last, per_token)


def _watch_workers(registry: CollectorRegistry, workers: WorkerSet) -> None:
    ready = Gauge("baton_workers_ready", "Workers that take requests.", ["role"], registry=registry)
    ready.labels("decode").set_function(lambda: _num_ready(workers.decodes))
    ready.labels("prefill").set_function(lambda: _num_ready(workers.prefills))
    shut = Gauge(
        "baton_breakers_open",
        "Workers whose calls failed too often: a probe must go well before they get others.",
        ["role"],
        registry=registry,
    )
    shut.labels("decode").set_function(lambda: _num_shut(workers.decodes))
    shut.labels("prefill").set_function(lambda: _num_shut(workers.prefills))


def _num_ready(workers: Sequence[Worker]) -> int:
    return sum(worker.is_ready for worker in workers)


def _num_shut(workers: Sequence[Worker]) -> int:
    now_s = time.monotonic()
    return sum(worker.breaker.state(now_s) != "closed" for worker in workers)


def _outcome(error: BaseException) -> str:
    if isinstance(error, (Disconnected, asyncio.CancelledError)):
        return "cancelled"
    if not isinstance(error, ApiError):
        return "failed"
    words: dict[int, str] = {
        HTTPStatus.TOO_MANY_REQUESTS: "overloaded",
        HTTPStatus.SERVICE_UNAVAILABLE: "unavailable",
        HTTPStatus.GATEWAY_TIMEOUT: "timeout",
    }
    is_client_s = error.status < HTTPStatus.INTERNAL_SERVER_ERROR
    return words.get(error.status, "rejected" if is_client_s else "failed")
