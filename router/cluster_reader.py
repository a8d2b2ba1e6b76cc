"""Reads the cluster off what the router knows anyway: workers' pushed states, records, latencies.

Asks nobody and waits for nothing. How much is read has bounds: the newest requests, the newest
handoffs, whatever there is.
"""

import time
from collections.abc import Iterator
from itertools import islice
from typing import Literal

from protos import serving_pb2 as pb
from router.admission import Admission
from router.cluster_view import (
    Blocks,
    Cluster,
    ClusterView,
    Handoff,
    RequestLine,
    WorkerView,
)
from router.dispatch import Dispatcher
from router.explain import brief
from router.latency import RecentLatency
from router.leg_record import LegRecord
from router.record import PromptRecord, Records, RequestRecord
from router.worker import Worker
from router.workers import WorkerSet

MAX_REQUESTS = 24
"""Listed."""
MAX_READ = 512
"""Looked through for handoffs."""
MAX_HANDOFFS = 64
_LATELY_NS = 5_000_000_000
"""A handoff that has ended stays for so long: viewers may miss a few events."""
_GOOD = ("", "done", "cancelled")

State = Literal["computing", "shipping", "done", "ended"]


class ClusterReader:
    """Parts of the view as JSON, and the whole of it."""

    def __init__(
        self,
        model: str,
        mode: Literal["disaggregated", "colocated"],
        workers: WorkerSet,
        admission: Admission,
        dispatcher: Dispatcher,
        records: Records,
        latency: RecentLatency,
    ) -> None:
        self._model = model
        self._mode = mode
        self._workers = workers
        self._admission = admission
        self._dispatcher = dispatcher
        self._records = records
        self._latency = latency
        self._began_ns = time.monotonic_ns()
        self._started_at = time.time()

    def view(self) -> ClusterView:
        return ClusterView(
            cluster=self._cluster(),
            requests=self._requests(),
            latency=self._latency.told(time.monotonic()),
        )

    def cluster_json(self) -> str:
        return self._cluster().model_dump_json()

    def requests_json(self) -> str:
        return "[" + ",".join(line.model_dump_json() for line in self._requests()) + "]"

    def latency_json(self) -> str:
        return self._latency.told(time.monotonic()).model_dump_json()

    def _cluster(self) -> Cluster:
        workers, dispatcher = self._workers, self._dispatcher
        num_waiting = self._admission.num_in_line
        return Cluster(
            model=self._model,
            mode=self._mode,
            ready=dispatcher.is_ready,
            started_at=self._started_at,
            num_prompts=num_waiting + dispatcher.live.num_running,
            num_in_line=num_waiting + dispatcher.num_in_line,
            workers=[worker_view(one) for one in (*workers.prefills, *workers.decodes)],
            handoffs=list(islice(self._handoffs(time.monotonic_ns()), MAX_HANDOFFS)),
        )

    def _requests(self) -> list[RequestLine]:
        return [request_line(one) for one in islice(self._records.newest_first(), MAX_REQUESTS)]

    def _handoffs(self, now_ns: int) -> Iterator[Handoff]:
        """The newest request's first."""
        since_ns = now_ns - _LATELY_NS
        for record in islice(self._records.newest_first(), MAX_READ):
            if record.end_ns and record.end_ns < since_ns:
                continue
            for prompt in record.prompts:
                for attempt in prompt.attempts:
                    for leg in attempt.prefills:
                        if attempt.decode and (not leg.end_ns or leg.end_ns >= since_ns):
                            yield self._handoff(prompt, attempt.decode, leg)

    def _handoff(self, prompt: PromptRecord, decode: LegRecord, leg: LegRecord) -> Handoff:
        return Handoff(
            id=f"{leg.worker}.{leg.begin_ns:x}",
            prefill=leg.worker,
            decode=decode.worker,
            state=_state_of(leg),
            outcome=leg.outcome or None,
            num_tokens=max(0, prompt.num_tokens - leg.first_token),
            nbytes=leg.timings.kv_nbytes if leg.timings and leg.end_ns else None,
            begin_ms=self._since_start(leg.begin_ns),
            end_ms=self._since_start(leg.end_ns) if leg.end_ns else None,
        )

    def _since_start(self, ns: int) -> float:
        return (ns - self._began_ns) / 1e6


def worker_view(worker: Worker) -> WorkerView:
    status = worker.status
    blocks, fabric = status.blocks, status.fabric
    return WorkerView(
        name=worker.name,
        address=worker.address,
        role="decode" if worker.role == pb.ROLE_DECODE else "prefill",
        generation=f"{status.generation:x}",
        ready=worker.is_ready,
        problem=worker.problem or None,
        draining=status.draining,
        num_waiting=status.num_waiting,
        num_running=status.num_running,
        num_awaiting_kv=status.num_awaiting_kv,
        queue_ms=status.queue_ms,
        num_blocks=status.num_blocks,
        block_size=status.block_size,
        kv_token_nbytes=status.kv_token_nbytes,
        blocks=Blocks(
            free=blocks.free,
            cached=blocks.cached,
            pinned=blocks.pinned,
            promised=blocks.promised,
            held=blocks.held,
            in_flight=blocks.in_flight,
        ),
        num_transfers=fabric.transfers,
        send_slots_used=fabric.send_slots_used,
        recv_slots_used=fabric.recv_slots_used,
    )


def request_line(record: RequestRecord) -> RequestLine:
    legs = [leg for prompt in record.prompts for attempt in prompt.attempts for leg in attempt.legs]
    told = [sample for prompt in record.prompts for sample in prompt.samples()]
    return RequestLine(
        **brief(record).model_dump(),
        read_ms=(record.read_ns - record.begin_ns) / 1e6 if record.read_ns else None,
        end_ms=(record.end_ns - record.begin_ns) / 1e6 if record.end_ns else None,
        num_prompt_tokens=sum(prompt.num_tokens for prompt in record.prompts),
        num_output_tokens=sum(sample.num_tokens for sample in told),
        num_failures=sum(leg.outcome not in _GOOD for leg in legs),
    )


def _state_of(leg: LegRecord) -> State:
    if leg.end_ns:
        return "done" if leg.outcome in _GOOD else "ended"
    return "shipping" if leg.answered_ns else "computing"
