"""What the prefill service measures: its queue, and its part of the handoff."""

from prometheus_client import CollectorRegistry, Histogram

from kvfabric.ticket import ShipReport
from runtime.metrics import TTFT_SECONDS, HandoffStages


class PrefillMetrics:
    """Observed once a leg, by `PrefillLeg`."""

    def __init__(self, registry: CollectorRegistry, stages: HandoffStages) -> None:
        self._stages = stages
        self._queue = Histogram(
            "baton_prefill_queue_seconds",
            "Time a prompt waited for its first chunk to be scheduled.",
            registry=registry,
            buckets=TTFT_SECONDS,
        )

    def observe_built(self, queue_ns: int, build_ns: int) -> None:
        self._queue.observe(queue_ns / 1e9)
        self._stages.observe("build", build_ns)

    def observe_shipped(self, report: ShipReport) -> None:
        self._stages.observe("pack", report.pack_ns)
        self._stages.observe("ship", report.ship_ns)
