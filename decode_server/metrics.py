"""What the decode service measures: its queue, its part of the handoff, its own prefills."""

from prometheus_client import CollectorRegistry, Counter, Histogram

from kvfabric.errors import FabricError
from runtime.metrics import TTFT_SECONDS, HandoffStages

LOCAL_PREFILL_REASONS = (
    "colocated", "no_prefill_worker", "queue_full", "probe", "prefix_hit",
    "cheaper_tail",
)  # fmt: skip
"""Reasons a router may give, and our own; any other counts as `other`, so that labels stay few."""


class DecodeMetrics:
    """Observed by `DecodeLeg` and the service."""

    def __init__(self, registry: CollectorRegistry, stages: HandoffStages) -> None:
        self._stages = stages
        self._queue = Histogram(
            "baton_decode_queue_seconds",
            "Time a request waited for room to be reserved.",
            registry=registry,
            buckets=TTFT_SECONDS,
        )
        self._transfer = Histogram(
            "baton_transfer_seconds",
            "Time from minting a ticket to COMMIT: queueing and computing on prefill included.",
            registry=registry,
            buckets=TTFT_SECONDS,
        )
        self._local_prefills = Counter(
            "baton_local_prefills_total",
            "Requests whose prompt this decode worker computed itself, told to by the router or, "
            "with `prefix_hit`, because its cache had all but the last block; by reason.",
            ["reason"],
            registry=registry,
        )
        self._lost = Counter(
            "baton_transfers_lost_total",
            "Transfers that were not completed, by error; each costs another ticket.",
            ["error"],
            registry=registry,
        )

    def observe_reserved(self, queue_ns: int) -> None:
        self._queue.observe(queue_ns / 1e9)

    def observe_installed(self, transfer_ns: int, install_ns: int) -> None:
        self._transfer.observe(transfer_ns / 1e9)
        self._stages.observe("install", install_ns)

    def observe_attached(self, attach_ns: int) -> None:
        self._stages.observe("attach", attach_ns)

    def count_local_prefill(self, reason: str) -> None:
        self._local_prefills.labels(reason if reason in LOCAL_PREFILL_REASONS else "other").inc()

    def count_lost(self, error: FabricError) -> None:
        self._lost.labels(type(error).__name__).inc()
