"""What the prefill service measures: its part of the handoff (build, pack, ship)."""

from prometheus_client import CollectorRegistry, Histogram

from kvfabric.sender import ShipReport
from runtime.metrics import STAGE_SECONDS


class PrefillMetrics:
    """Observed once a leg, by `PrefillLeg`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._stage = Histogram(
            "baton_prefill_stage_seconds",
            "Time of a prefill leg's stages: queue, build (compute), pack (gather into slots), "
            "ship (first frame handed to the network to last slot free).",
            ["stage"],
            registry=registry,
            buckets=STAGE_SECONDS,
        )

    def observe_built(self, queue_ns: int, build_ns: int) -> None:
        self._stage.labels("queue").observe(queue_ns / 1e9)
        self._stage.labels("build").observe(build_ns / 1e9)

    def observe_shipped(self, report: ShipReport) -> None:
        self._stage.labels("pack").observe(report.pack_ns / 1e9)
        self._stage.labels("ship").observe(report.ship_ns / 1e9)
