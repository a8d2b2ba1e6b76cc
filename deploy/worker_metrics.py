"""The gauges and counters of a worker, read from engine and fabric when somebody scrapes.

Names that start with `vllm:` are those which the Gateway API Inference Extension reads.
"""

import asyncio
from collections.abc import Iterator, Sized

from prometheus_client import CollectorRegistry, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from engine.engine import Engine
from engine.stats import EngineStats
from kvfabric.fabric import Fabric
from kvfabric.stats import FabricStats
from runtime.metrics import LOOP_WAIT_SECONDS


def loop_wait_histogram(registry: CollectorRegistry) -> Histogram:
    return Histogram(
        "baton_loop_wait_seconds",
        "Time between the engine's hand-over of a step's events and the service loop taking it.",
        registry=registry,
        buckets=LOOP_WAIT_SECONDS,
    )


def count_watchers(registry: CollectorRegistry, watchers: Sized) -> None:
    gauge = Gauge("baton_state_watchers", "Routers that follow its state.", registry=registry)
    gauge.set_function(lambda: len(watchers))


def watch_tasks(registry: CollectorRegistry, loop: asyncio.AbstractEventLoop) -> None:
    """A number that comes back to where it was when requests end, or something leaks."""
    tasks = Gauge("baton_service_tasks", "Tasks on the service loop.", registry=registry)
    tasks.set_function(lambda: len(asyncio.all_tasks(loop)))


class WorkerCollector(Collector):
    """Snapshots of `Engine.stats` and `Fabric.stats` as metric families."""

    def __init__(self, engine: Engine, fabric: Fabric) -> None:
        self._engine = engine
        self._fabric = fabric

    def collect(self) -> Iterator[Metric]:
        yield from self._engine_families()
        yield from self._fabric_families()

    def _engine_families(self) -> Iterator[Metric]:
        stats = self._engine.stats()
        usage = 1 - stats.blocks.unused / self._engine.num_blocks
        yield _gauge("vllm:num_requests_waiting", "Requests not scheduled yet.", stats.waiting)
        yield _gauge("vllm:num_requests_running", "Requests in the batch.", stats.running)
        yield _gauge("vllm:kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.", usage)
        yield _labelled(
            GaugeMetricFamily(
                "vllm:cache_config_info", "KV pool.", labels=["block_size", "num_gpu_blocks"]
            ),
            {(str(self._engine.block_size), str(self._engine.num_blocks)): 1},
        )
        yield _labelled(
            GaugeMetricFamily("baton_requests", "Requests by state.", labels=["state"]),
            {
                ("waiting",): stats.waiting,
                ("running",): stats.running,
                ("awaiting_kv",): stats.awaiting_kv,
            },
        )
        yield _labelled(
            GaugeMetricFamily("baton_kv_blocks", "KV blocks by state.", labels=["state"]),
            {
                ("free",): stats.blocks.free,
                ("cached",): stats.blocks.cached,
                ("held",): stats.blocks.held,
                ("in_flight",): stats.blocks.in_flight,
                ("promised",): stats.blocks.promised,
                ("pinned",): stats.blocks.pinned,
            },
        )
        yield _gauge("baton_pins", "Prefixes that are pinned.", stats.pins)
        yield _labelled(
            CounterMetricFamily(
                "baton_prompt_tokens", "Prompt tokens by source of their KV.", labels=["source"]
            ),
            {
                ("computed",): stats.prompt_tokens_computed,
                ("received",): stats.prompt_tokens_received,
                ("prefix_hit",): stats.prompt_tokens_hit,
            },
        )
        yield _counter(
            "baton_output_tokens_computed",
            "Output tokens whose KV was computed, again after a resume or a preemption included.",
            stats.output_tokens_computed,
        )
        yield _counter("baton_output_tokens", "Output tokens sampled.", stats.tokens_sampled)
        yield _counter("baton_engine_steps", "Steps that computed something.", stats.steps)
        yield _counter("baton_engine_turns", "Turns of the engine loop, idle or not.", stats.turns)
        yield _counter(
            "baton_preemptions",
            "Sequences that lost their blocks to older ones.",
            stats.preemptions,
        )
        yield _violations(stats, self._fabric.stats())
        yield from _swap_families(stats)
        yield from _queue_families(stats)
        yield from _step_cost_families(stats)

    def _fabric_families(self) -> Iterator[Metric]:
        stats = self._fabric.stats()
        yield from _slot_families(stats)
        yield _labelled(
            GaugeMetricFamily("baton_transfers", "Transfers under way.", labels=["direction"]),
            {("in",): stats.expected_transfers, ("out",): stats.outgoing_transfers},
        )
        yield _gauge("baton_fabric_endpoints", "Live connections to peers.", stats.endpoints)
        yield _labelled(
            GaugeMetricFamily(
                "baton_fabric_transport",
                "1 for what live connections really run over.",
                labels=["transport"],
            ),
            {(transport,): 1 for transport in stats.transports},
        )
        yield _labelled(
            CounterMetricFamily(
                "baton_handoff_bytes", "KV payload bytes moved.", labels=["direction"]
            ),
            {("sent",): stats.sent_nbytes, ("received",): stats.received_nbytes},
        )
        yield _labelled(
            CounterMetricFamily("baton_handoff_frames", "KV frames moved.", labels=["direction"]),
            {("sent",): stats.sent_frames, ("received",): stats.received_frames},
        )
        yield _counter(
            "baton_handoff_frames_dropped",
            "Frames received and thrown away: late, unknown or duplicate.",
            stats.dropped_frames,
        )
        yield _gauge(
            "baton_fabric_loop_lag_seconds",
            "Longest time a due timer waited for the fabric's loop in the last 15 s.",
            stats.loop_lag_s,
        )
        yield _labelled(
            CounterMetricFamily("baton_fabric_errors", "Errors of the fabric.", labels=["error"]),
            {(name,): count for name, count in stats.errors.items()},
        )
        yield _labelled(
            GaugeMetricFamily(
                "baton_link_bytes_per_second",
                "What a connection to a receiver was measured to carry; slow ones get codecs.",
                labels=["address"],
            ),
            {(address,): speed for address, speed in stats.links_nbytes_per_s.items()},
        )
        if stats.injected_faults:
            yield _labelled(
                CounterMetricFamily(
                    "baton_fabric_injected_faults",
                    "Messages harmed on purpose (--inject-faults), by kind of message and fault.",
                    labels=["fault"],
                ),
                {(name,): count for name, count in stats.injected_faults.items()},
            )


def _slot_families(stats: FabricStats) -> Iterator[Metric]:
    yield _labelled(
        GaugeMetricFamily("baton_staging_slots_used", "Slots in use.", labels=["budget"]),
        {("send",): stats.send_slots_used, ("recv",): stats.recv_slots_used},
    )
    yield _labelled(
        GaugeMetricFamily("baton_staging_slots", "Slots there are.", labels=["budget"]),
        {("send",): stats.send_slots, ("recv",): stats.recv_slots},
    )


def _violations(engine: EngineStats, fabric: FabricStats) -> Metric:
    return _labelled(
        CounterMetricFamily(
            "baton_ledger_violations",
            "Audits that found counts and owners to disagree: something leaked.",
            labels=["of"],
        ),
        {("blocks",): engine.ledger_violations, ("slots",): fabric.ledger_violations},
    )


def _swap_families(stats: EngineStats) -> Iterator[Metric]:
    yield _labelled(
        GaugeMetricFamily(
            "baton_swap_bytes",
            "Host memory for the KV of sequences that gave way.",
            labels=["state"],
        ),
        {
            ("used",): stats.swap_used_nbytes,
            ("free",): stats.swap_capacity_nbytes - stats.swap_used_nbytes,
        },
    )
    yield _labelled(
        CounterMetricFamily(
            "baton_swapped_tokens",
            "Tokens whose KV was copied to host memory, and back.",
            labels=["direction"],
        ),
        {("out",): stats.tokens_swapped_out, ("in",): stats.tokens_swapped_in},
    )


def _queue_families(stats: EngineStats) -> Iterator[Metric]:
    yield _gauge(
        "baton_queue_seconds",
        "How long a prompt that came now would wait for those before it, by prediction.",
        stats.queue_seconds,
    )
    yield _counter(
        "baton_prefills_refused",
        "Prefill legs that would have waited longer than allowed.",
        stats.prefills_refused,
    )


def _step_cost_families(stats: EngineStats) -> Iterator[Metric]:
    yield _labelled(
        CounterMetricFamily(
            "baton_engine_step_seconds",
            "Time of all measured steps, and what the cost model had predicted of them.",
            labels=["kind"],
        ),
        {("measured",): stats.step_seconds, ("predicted",): stats.step_seconds_predicted},
    )
    yield _counter(
        "baton_engine_step_error_seconds",
        "Differences between predicted and measured step times, absolute, summed.",
        stats.step_seconds_error,
    )
    yield _labelled(
        GaugeMetricFamily(
            "baton_engine_step_cost_seconds",
            "What the cost model reckons for one more of a feature of a step.",
            labels=["feature"],
        ),
        {(feature,): seconds for feature, seconds in stats.step_cost.items()},
    )


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, text, value=value)


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(name, text, value=value)


def _labelled(
    family: GaugeMetricFamily | CounterMetricFamily, samples: dict[tuple[str, ...], float]
) -> Metric:
    for labels, value in samples.items():
        family.add_metric(labels, value)
    return family
