"""What the three dashboards show: titles, units and PromQL. deploy/dashboards.py makes JSON of it.

A new panel goes here; `python -m deploy.dashboards` then writes the files. Every expression must
name metrics that a cluster really exports: tests/deploy/test_dashboards.py looks.
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Panel:
    """`queries`: legend → PromQL. `stack`: the series are parts of a whole."""

    title: str
    text: str
    unit: str
    queries: dict[str, str]
    kind: Literal["timeseries", "stat"] = "timeseries"
    stack: bool = False


@dataclass(frozen=True, slots=True)
class Dashboard:
    uid: str
    title: str
    panels: tuple[Panel, ...]


def _per_s(counter: str, by: str = "") -> str:
    grouped = f" by ({by}) " if by else ""
    return f"sum{grouped}(rate({counter}[$__rate_interval]))"


def _share(counter: str, selector: str, by: str) -> str:
    return f"{_per_s(f'{counter}{{{selector}}}', by)} / {_per_s(counter, by)}"


def _quantile(q: float, histogram: str, by: str = "") -> str:
    labels = f"le, {by}" if by else "le"
    return (
        f"histogram_quantile({q}, sum by ({labels}) (rate({histogram}_bucket[$__rate_interval])))"
    )


def _quantiles(histogram: str) -> dict[str, str]:
    return {f"p{round(100 * q)}": _quantile(q, histogram) for q in (0.5, 0.9, 0.99)}


def _mean(histogram: str, by: str = "") -> str:
    return f"{_per_s(f'{histogram}_sum', by)} / {_per_s(f'{histogram}_count', by)}"


CLUSTER = Dashboard(
    "baton-cluster",
    "Baton: cluster",
    (
        Panel(
            "Workers that take requests", "A pool at 0 is dead: BatonPoolDead pages.", "short",
            {"{{role}}": "sum by (role) (baton_workers_ready)"}, kind="stat",
        ),
        Panel(
            "Goodput",
            "Of the requests that named an objective, the share that met it.", "percentunit",
            {
                "{{objective}}": _share("baton_objectives_total", 'outcome="met"', "objective")
            },
        ),
        Panel(
            "Requests by outcome", "overloaded is 429, rejected the client's own error.", "reqps",
            {"{{outcome}}": _per_s("baton_requests_total", "outcome")}, stack=True,
        ),
        Panel(
            "Time to first token", "As a client sees it, the router's own time included.", "s",
            _quantiles("baton_time_to_first_token_seconds"),
        ),
        Panel(
            "Time per output token", "Of each answer, after its first token.", "s",
            _quantiles("baton_time_per_output_token_seconds"),
        ),
        Panel(
            "Inter-token latency", "Every gap: unlike the mean of an answer it shows stalls.", "s",
            _quantiles("baton_inter_token_latency_seconds"),
        ),
        Panel(
            "Tokens", "Prompt tokens taken in, output tokens delivered.", "short",
            {
                "prompt/s": _per_s("baton_request_prompt_tokens_total"),
                "output/s": _per_s("baton_request_output_tokens_total"),
            },
        ),
        Panel(
            "Requests in the workers", "By state; awaiting_kv wait for their handoff.", "short",
            {"{{role}} {{state}}": "sum by (role, state) (baton_requests)"}, stack=True,
        ),
        Panel(
            "Queues", "Where work waits: in the router, or at a worker, by its prediction.", "s",
            {
                "router p99": _quantile(0.99, "baton_admission_wait_seconds"),
                "{{instance}}": "baton_queue_seconds",
            },
        ),
        Panel(
            "KV blocks by state",
            "held: of running requests; promised: of those that will come; cached: may go.",
            "short",
            {"{{role}} {{state}}": "sum by (role, state) (baton_kv_blocks)"}, stack=True,
        ),
        Panel(
            "Preemptions", "Streams that gave way to older ones: the pool is too small.", "short",
            {"{{instance}}": _per_s("baton_preemptions_total", "instance")},
        ),
        Panel(
            "CPU", "Cores in use, by process.", "short",
            {"{{instance}}": "rate(process_cpu_seconds_total[$__rate_interval])"},
        ),
    ),
)  # fmt: skip

HANDOFF = Dashboard(
    "baton-handoff",
    "Baton: the handoff",
    (
        Panel(
            "The five stages, mean", "build overlaps ship: what is felt is the next panel.", "s",
            {"{{stage}}": _mean("baton_handoff_stage_seconds", "stage")}, stack=True,
        ),
        Panel(
            "Exposed handoff", "From the last chunk computed to joining decode's batch.", "s",
            _quantiles("baton_handoff_exposed_seconds"),
        ),
        Panel(
            "Exposed share of TTFT", "What disaggregation costs of the wait for an answer.",
            "percentunit",
            {
                "share": f"{_per_s('baton_handoff_exposed_seconds_sum')}"
                f" / {_per_s('baton_time_to_first_token_seconds_sum')}"
            },
        ),
        Panel(
            "Stages, p99", "The tail of each.", "s",
            {"{{stage}}": _quantile(0.99, "baton_handoff_stage_seconds", "stage")},
        ),
        Panel(
            "KV bytes", "Payload, by direction and worker.", "Bps",
            {
                "{{instance}} {{direction}}": _per_s(
                    "baton_handoff_bytes_total", "instance, direction"
                )
            },
        ),
        Panel(
            "Transfers under way", "Expected by decode, on their way out of prefill.", "short",
            {"{{instance}} {{direction}}": "baton_transfers"},
        ),
        Panel(
            "Transfers lost", "By error; each costs another ticket, never an answer.", "short",
            {"{{error}}": _per_s("baton_transfers_lost_total", "error")},
        ),
        Panel(
            "Frames dropped, errors", "Late, unknown or duplicate frames; the fabric's errors.",
            "short",
            {
                "{{instance}} dropped": _per_s("baton_handoff_frames_dropped_total", "instance"),
                "{{error}}": _per_s("baton_fabric_errors_total", "error"),
            },
        ),
        Panel(
            "Staging slots in use", "At 1 senders or receivers wait for each other.",
            "percentunit",
            {
                "{{instance}} {{budget}}": "baton_staging_slots_used / baton_staging_slots",
            },
        ),
        Panel(
            "Links", "What connections were measured to carry; slow ones get codecs.", "Bps",
            {"{{instance}} to {{address}}": "baton_link_bytes_per_second"},
        ),
        Panel(
            "Transports in use", "Worth a look when RDMA is expected and tcp is said.", "short",
            {"{{transport}}": "sum by (transport) (baton_fabric_transport)"},
        ),
        Panel(
            "Leaks", "All of these are 0, or something is wrong.", "short",
            {
                "violations": "sum(increase(baton_ledger_violations_total[10m]))",
                "owners without a call": "sum(baton_ledger_owners_without_call)",
                "ledgers not told": "sum(baton_ledger_unanswered)",
            },
        ),
    ),
)  # fmt: skip

ROUTER = Dashboard(
    "baton-router",
    "Baton: the router",
    (
        Panel(
            "Prompts computed by decode workers", "Why the relay was not run.", "reqps",
            {"{{reason}}": _per_s("baton_local_prefills_total", "reason")}, stack=True,
        ),
        Panel(
            "Saved by disaggregation", "Mean of those it helped, by the way taken.", "s",
            {"{{way}}": _mean("baton_disaggregation_saved_seconds", "way")},
        ),
        Panel(
            "Cost of disaggregation", "Mean of those it hurt, by the way taken.", "s",
            {"{{way}}": _mean("baton_disaggregation_cost_seconds", "way")},
        ),
        Panel(
            "Prompt tokens by source", "Of workers: computed, received as KV, found in a cache.",
            "short",
            {"{{role}} {{source}}": _per_s("baton_prompt_tokens_total", "role, source")},
            stack=True,
        ),
        Panel(
            "Prefix hit rate", "Share of prompt tokens that nobody had to compute again.",
            "percentunit",
            {
                "{{role}}": _share("baton_prompt_tokens_total", 'source="prefix_hit"', "role")
            },
        ),
        Panel(
            "Retries", "Legs that failed or were opened again.", "short",
            {"{{leg}} {{reason}}": _per_s("baton_retries_total", "leg, reason")},
        ),
        Panel(
            "Migrations", "Answers that went on at another worker, unbroken.", "short",
            {"{{reason}}": _per_s("baton_migrations_total", "reason")},
        ),
        Panel(
            "Breakers open", "Workers that get no requests until a probe goes well.", "short",
            {"{{role}}": "sum by (role) (baton_breakers_open)"}, kind="stat",
        ),
        Panel(
            "Admission queue", "Requests that wait for a worker with room.", "short",
            {"{{instance}}": "baton_admission_queue_length"},
        ),
        Panel(
            "Refused before the start", "By reason.", "reqps",
            {"{{reason}}": _per_s("baton_admission_rejections_total", "reason")}, stack=True,
        ),
        Panel(
            "Tokens by tenant", "Prompt and output.", "short",
            {"{{tenant}} {{kind}}": _per_s("baton_tenant_tokens_total", "tenant, kind")},
            stack=True,
        ),
        Panel(
            "Stages by leg, p99", "Queues too; validate and line are the router's own.", "s",
            {"{{stage}}": _quantile(0.99, "baton_request_stage_seconds", "stage")},
        ),
    ),
)  # fmt: skip

DASHBOARDS = (CLUSTER, HANDOFF, ROUTER)
