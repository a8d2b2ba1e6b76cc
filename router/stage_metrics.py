"""Where requests' time goes, as histograms and as words for the log; from their records."""

from prometheus_client import CollectorRegistry, Histogram

from router.record import RequestRecord
from router.timeline import exposed, parts, stage_times
from runtime.metrics import STAGE_SECONDS, TTFT_SECONDS


class StageMetrics:
    """Observed once a request, when it has ended."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._stages = Histogram(
            "baton_request_stage_seconds",
            "Stages of a request as its workers told them, by leg, and the router's own: "
            "validate (text to tokens), line (waiting for a prefill queue with room).",
            ["stage"],
            registry=registry,
            buckets=STAGE_SECONDS,
        )
        self._exposed = Histogram(
            "baton_handoff_exposed_seconds",
            "The part of a handoff that its request felt: from the last chunk computed to joining "
            "decode's batch.",
            registry=registry,
            buckets=STAGE_SECONDS,
        )

    def observe(self, record: RequestRecord) -> dict[str, float]:
        """Returns what the log says of it, in milliseconds."""
        told = {}
        for stage, ns in stage_times(record):
            self._stages.labels(stage).observe(ns / 1e9)
        if record.first_token_ns:
            told["ttft_ms"] = (record.first_token_ns - record.read_ns) / 1e6
        felt = [one for prompt in record.prompts if (one := exposed(prompt)) is not None]
        for one in felt:
            self._exposed.observe(one.ns / 1e9)
        if felt:
            told["exposed_ms"] = max(one.ns for one in felt) / 1e6
        if (shares := parts(record, record.end_ns)) is not None:
            told["residual_ms"] = shares.residual_ns / 1e6
        return {name: round(ms, 2) for name, ms in told.items()}


class DisaggregationMetrics:
    """What it gained or cost, by what came and by what was predicted of the way not taken."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._saved, self._cost = (
            Histogram(
                f"baton_disaggregation_{word}_seconds",
                f"What disaggregation {text}, of time to the first token and to joining decode's "
                "batch, against what was predicted of the other way.",
                ["way"],
                registry=registry,
                buckets=TTFT_SECONDS,
            )
            for word, text in (("saved", "saved or would have"), ("cost", "cost or would have"))
        )

    def observe(self, way: str, seconds: float) -> None:
        """`way`: the one taken, remote or local. Negative: it cost."""
        (self._saved if seconds >= 0 else self._cost).labels(way).observe(abs(seconds))
