"""What the engine does when KV has come from elsewhere, or will not come any more.

On the engine thread; what comes of it are events. The scheduler decides, the runner is told before
the next step which copies that step must see.
"""

from collections.abc import Mapping

from engine.kv_lease import KVLease
from engine.model_runner import Runner
from engine.request import EngineEvent, FirstToken, RequestId
from engine.scheduler import Scheduler
from engine.stats import StepCounters
from engine.step_events import events_after_attach


class KVArrival:
    """See the module."""

    def __init__(self, scheduler: Scheduler, runner: Runner, counters: StepCounters) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._counters = counters

    def attach(
        self, request_id: RequestId, first: FirstToken | None, others: Mapping[int, FirstToken]
    ) -> list[EngineEvent]:
        """All of it has come."""
        samples = self._scheduler.samples(request_id)
        lease = samples[0].lease if samples else None
        first_token_id = None if first is None else first.token_id
        token_ids = {sample: token.token_id for sample, token in others.items()}
        seq = self._scheduler.attach(request_id, first_token_id, token_ids)
        if seq is None:
            return []
        self._counters.count_received(seq, seq.num_prompt_tokens)
        if lease is not None:
            self._runner.wait_for_copies(lease)
        self.copy_blocks()
        return [] if first is None else events_after_attach(samples, first, others)

    def compute_rest(self, request_id: RequestId, num_tokens: int) -> None:
        """So much of it has come, and no more will."""
        samples = self._scheduler.samples(request_id)
        lease = samples[0].lease if samples else None
        seq = self._scheduler.compute_rest(request_id, num_tokens)
        if seq is not None:
            self._counters.count_received(seq, seq.num_computed_tokens)
            if lease is not None:
                self._runner.wait_for_copies(lease)

    def drained(self, lease: KVLease) -> None:
        """The last copy under a closed lease is over."""
        self._runner.wait_for_copies(lease)
        self._scheduler.drained(lease)

    def copy_blocks(self) -> None:
        """For those that have forked."""
        if copies := self._scheduler.forks.take_copies():
            self._runner.copy_blocks(copies)
