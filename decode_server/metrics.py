"""What the decode service measures: its part of the handoff, and what it prefilled itself."""

from prometheus_client import CollectorRegistry, Counter, Histogram

from runtime.metrics import STAGE_SECONDS

LOCAL_PREFILL_REASONS = ("colocated", "no_prefill_worker", "single_token")
"""Reasons a router may give; any other counts as `other`, so that labels stay few."""


class DecodeMetrics:
    """Observed by `DecodeLeg` and the service."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._stage = Histogram(
            "baton_decode_stage_seconds",
            "Time of a decode leg's stages: queue (until room is reserved), transfer (ticket to "
            "COMMIT), install (scattering into blocks, summed), attach (COMMIT to joining the "
            "batch).",
            ["stage"],
            registry=registry,
            buckets=STAGE_SECONDS,
        )
        self._local_prefills = Counter(
            "baton_local_prefills_total",
            "Requests whose prompt this decode worker computed itself, by reason.",
            ["reason"],
            registry=registry,
        )
        self._received_tokens = Counter(
            "baton_received_prompt_tokens_total",
            "Prompt tokens whose KV came by a transfer and was attached.",
            registry=registry,
        )
        self._lost = Counter(
            "baton_transfers_lost_total",
            "Transfers that were not completed, by error; each costs another ticket.",
            ["error"],
            registry=registry,
        )

    def observe_stage(self, stage: str, ns: int) -> None:
        self._stage.labels(stage).observe(ns / 1e9)

    def count_local_prefill(self, reason: str) -> None:
        self._local_prefills.labels(reason if reason in LOCAL_PREFILL_REASONS else "other").inc()

    def count_received_tokens(self, num_tokens: int) -> None:
        self._received_tokens.inc(num_tokens)

    def count_lost(self, error: Exception) -> None:
        self._lost.labels(type(error).__name__).inc()
