"""What admission counts. Labels are bounded: tenants beyond `MAX_TENANTS` share one."""

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from runtime.metrics import TTFT_SECONDS

MAX_TENANTS = 64
OTHER = "other"

REASONS = (
    "invalid_api_key", "requests_per_min", "tokens_per_min", "concurrent",
    "slo_ttft", "slo_tpot", "queue_full", "queue_deadline",
)  # fmt: skip


class AdmissionMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self._rejections = Counter(
            "baton_admission_rejections",
            "Requests that were refused before anything was done for them, by reason.",
            ["reason"],
            registry=registry,
        )
        for reason in REASONS:
            self._rejections.labels(reason)
        self.queue_length = Gauge(
            "baton_admission_queue_length",
            "Requests that wait in the router until a worker has room.",
            registry=registry,
        )
        self.wait = Histogram(
            "baton_admission_wait_seconds",
            "How long they waited: all that were let through, those that did not wait included.",
            registry=registry,
            buckets=(0.001, *TTFT_SECONDS),
        )
        self._tokens = Counter(
            "baton_tenant_tokens",
            "Tokens served, by tenant (the first ones by name) and kind: prompt, output.",
            ["tenant", "kind"],
            registry=registry,
        )
        self._objectives = Counter(
            "baton_objectives",
            "Requests with an objective that were answered, by whether they met it.",
            ["objective", "outcome"],
            registry=registry,
        )
        self.keys = Gauge("baton_api_keys", "API keys that are known.", registry=registry)
        self._reloads = Counter(
            "baton_api_key_reloads",
            "Times that the API keys were read again: done, or failed and left as they were.",
            ["outcome"],
            registry=registry,
        )
        self._named: set[str] = set()

    def name_tenants(self, names: Iterable[str]) -> None:
        """Those that there are. A label that was given once is kept."""
        for name in sorted(set(names)):
            if len(self._named) < MAX_TENANTS:
                self._named.add(name)

    def refused(self, reason: str) -> None:
        self._rejections.labels(reason).inc()

    def served(self, tenant: str, kind: str, num_tokens: int) -> None:
        if num_tokens > 0:
            label = tenant if tenant in self._named else OTHER
            self._tokens.labels(label, kind).inc(num_tokens)

    def objective(self, name: str, *, is_met: bool) -> None:
        self._objectives.labels(name, "met" if is_met else "missed").inc()

    def reloaded(self, went_well: bool) -> None:
        self._reloads.labels("done" if went_well else "failed").inc()
