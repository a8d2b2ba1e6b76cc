"""Places prompts by what the workers say and what was measured: the cost model, kept up to date.

1. `place` describes each worker as this prompt finds it and has router/placement.py choose.
2. The prefill that was placed counts there until it should be over: prompts of the same moment must
   not all go to one worker, whatever it said last.
3. `ended` learns from what became of it, and tells what the way not taken would have been.

Knows workers and records, and calls nobody.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from router.affinity import keep_session
from router.config import RouterConfig
from router.cost_model import CostModel, Pace, Streams
from router.decode_forecast import DecodeForecast
from router.early_rejection import Times
from router.placement import Crowd, Demand, Quote, Site
from router.policy import Pair
from router.prefill_queue import PrefillQueue
from router.prefix_index import PromptBlocks
from router.progress import Progress
from router.request import ValidPrompt
from router.scene import Scene
from router.timeline import exposed
from router.workers import DecodeWorker, PrefillWorker, Worker

_WEIGHT = 0.02
"""Of the newest, in means over requests."""
_FIRST_NUM_OUTPUTS = 128.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What disaggregation gained on one request, in seconds; negative: it cost, or would have."""

    way: str
    """`remote` or `local`: the one taken."""
    saved_s: float


class Prediction(NamedTuple):
    """Of a request that would come now."""

    loaded: Times
    idle: Times
    """If nobody else were there."""
    life_s: float
    """How long streams run, where it would be decoded."""


class _Coming(NamedTuple):
    """A prompt that was placed, and whose first token has not come."""

    at_s: float
    is_over: Callable[[], bool]


class Placer:
    """See the module. `clock` in seconds."""

    def __init__(self, config: RouterConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self.costs = CostModel(kind_of=self._kind_of)
        self.num_outputs = _FIRST_NUM_OUTPUTS
        """Tokens of a sample, on average."""
        self._crowd = Crowd()
        self._affinity = config.session_affinity
        self._clock = clock
        self._queues: dict[str, PrefillQueue] = {}
        self._coming: dict[str, list[_Coming]] = {}  # to decode workers, by address
        self._seen: dict[str, int] = {}  # address → states of it that were taken in
        self._kinds: dict[str, bytes] = {}

    def place(
        self,
        progress: Progress,
        decodes: Sequence[DecodeWorker],
        prefills: Sequence[PrefillWorker],
        *,
        is_forced: bool,
    ) -> Pair[DecodeWorker, PrefillWorker] | None:
        """None: nobody is ready, or not enough is known; `progress.placement` says what was
        predicted. `is_forced`: not on decode, where there is a choice."""
        progress.placement = None
        decodes = [worker for worker in decodes if worker.is_ready]
        prefills = [worker for worker in prefills if worker.is_ready]
        prompt = progress.prompt
        scene = self._scene(prompt, decodes, prefills, is_forced=is_forced)
        self._crowd.note(
            [worker.status.num_waiting + worker.status.num_running for worker in prefills]
        )
        found = scene.place(self.costs, self._crowd.mean)
        if found is None:
            return None
        if prompt.session:
            sites = scene.prefills, scene.decodes
            found = keep_session(found, prompt.session, self._affinity, *sites)
        progress.placement = found
        self._begin(progress, found.taken)
        by_address = {worker.address: worker for worker in prefills}
        taken = next(worker for worker in decodes if worker.address == found.taken.decode)
        return Pair(taken, by_address.get(found.taken.prefill))

    def predict(
        self,
        prompt: ValidPrompt,
        decodes: Sequence[DecodeWorker],
        prefills: Sequence[PrefillWorker],
        *,
        is_forced: bool,
    ) -> Prediction | None:
        """What would become of it now; None if not enough is known."""
        decodes = [worker for worker in decodes if worker.is_ready]
        prefills = [worker for worker in prefills if worker.is_ready]
        scene = self._scene(prompt, decodes, prefills, is_forced=is_forced)
        loaded = scene.place(self.costs, self._crowd.mean)
        idle = scene.idle().place(self.costs, 0.0)
        if loaded is None or idle is None:
            return None
        at = next(one for one in scene.decodes if one.address == loaded.taken.decode)
        return Prediction(
            Times(loaded.taken.ttft_s, loaded.taken.tpot_s),
            Times(idle.taken.ttft_s, idle.taken.tpot_s),
            at.forecast.life_s if at.forecast is not None else 0.0,
        )

    def _scene(
        self,
        prompt: ValidPrompt,
        decodes: Sequence[DecodeWorker],
        prefills: Sequence[PrefillWorker],
        *,
        is_forced: bool,
    ) -> Scene:
        for worker in (*decodes, *prefills):
            self._take_in(worker)
        demand = Demand(
            len(prompt.token_ids),
            min(prompt.sampling.max_tokens, self.num_outputs),
            max((worker.status.kv_token_nbytes for worker in decodes), default=0),
            prompt.objective,
        )
        blocks = PromptBlocks(prompt.token_ids, prompt.cache_salt)
        at_decode = [self._site(worker, blocks, demand) for worker in decodes]
        at_prefill = [self._site(worker, blocks, demand) for worker in prefills]
        pairs = [
            (one, other)
            for other, decode in enumerate(decodes)
            for one, prefill in enumerate(prefills)
            if prefill.fingerprint == decode.fingerprint and prefill.address != decode.address
        ]
        return Scene(demand, at_prefill, at_decode, pairs, may_be_alone=not (is_forced and pairs))

    def ahead_s(self, worker: Worker, num_tokens: int) -> float:
        """What is to be computed there before a prompt of so many tokens."""
        queue = self._queue(worker.address)
        queue.ageing = worker.status.queue_ageing
        return queue.look(self._clock(), num_tokens, worker.queue_s).ahead_s

    def prefill_s(self, worker: Worker, num_tokens: int) -> float:
        """Of a prompt that nobody has cached, alone there; 0 while nothing is known."""
        found = self.costs.prefill_s(worker.address, num_tokens, 0, _pace(worker))
        return 0.0 if found is None else found.total

    def ended(self, progress: Progress, picked_s: float) -> Outcome | None:
        """The attempt that was placed at `picked_s` went well, as the first of its prompt."""
        found = progress.placement
        for sample in progress.samples:
            self.num_outputs += _WEIGHT * (len(sample.token_ids) - self.num_outputs)
        first_s = min((s.first_s for s in progress.samples if s.first_s), default=0.0)
        if found is None or not first_s or progress.record.num_attempts > 1:
            return None
        taken, ttft_s = found.taken, first_s - picked_s
        attempt = progress.record.attempt
        if len(attempt.prefills) != bool(taken.prefill):
            return None  # it was lost and asked for again, or was all cached
        self.costs.way(taken.prefill, taken.decode).learn((1, taken.raw_ttft_s), ttft_s)
        felt_s = 0.0
        if taken.prefill and (felt := exposed(progress.record)) is not None:
            felt_s = felt.ns / 1e9
            told = attempt.decode.timings if attempt.decode is not None else None
            nbytes = told.kv_nbytes if told is not None else 0
            self.costs.link(taken.prefill, taken.decode).learn((1, nbytes), felt_s)
        if found.other is None:
            return None
        gain_s = found.other.ttft_s + found.other.transfer_s - ttft_s - felt_s
        return Outcome("remote", gain_s) if taken.prefill else Outcome("local", -gain_s)

    def _take_in(self, worker: Worker) -> None:
        self._kinds[worker.address] = worker.fingerprint
        if self._seen.get(worker.address) != worker.num_refreshes:
            self._seen[worker.address] = worker.num_refreshes
            steps = worker.steps
            self.costs.told_link(worker.address, worker.status.fabric_bytes_per_s)
            self.costs.worker(worker.address).told(
                steps.weights, steps.work, steps.seconds, knows_prefill=steps.knows_prefill
            )

    def _begin(self, progress: Progress, quote: Quote) -> None:
        taken = progress.placement

        def is_over() -> bool:
            return progress.placement is not taken or any(s.first_s for s in progress.samples)

        coming = _Coming(self._clock() + quote.ttft_s, is_over)
        self._coming.setdefault(quote.decode, []).append(coming)
        queue = self._queue(quote.prefill or quote.decode)
        queue.add(self._clock(), quote.num_to_compute, quote.prefill_s, is_over)

    def _queue(self, address: str) -> PrefillQueue:
        return self._queues.setdefault(address, PrefillQueue())

    def _site(self, worker: Worker, blocks: PromptBlocks, demand: Demand) -> Site:
        status = worker.status
        num_cached = blocks.num_cached_tokens(worker.index, worker.fingerprint, status.block_size)
        num_left = demand.num_tokens - num_cached
        queue = self._queue(worker.address)
        queue.ageing = status.queue_ageing
        wait = queue.look(self._clock(), num_left, worker.queue_s)
        num_streams = max(0, worker.load - wait.num_behind)
        streams = Streams(num_streams, status.blocks.held * status.block_size)
        return Site(
            worker.address,
            wait.ahead_s,
            num_cached,
            num_behind=wait.num_behind,
            pace=_pace(worker),
            streams=streams,
            forecast=self._forecast(worker, streams),
            room_s=self._room_s(worker, num_left, streams),
            load=worker.load,
            num_picks=worker.num_picks,
            name=worker.name,
        )

    def _forecast(self, worker: Worker, streams: Streams) -> DecodeForecast:
        now_s, status = self._clock(), worker.status
        coming = self._coming[worker.address] = [
            one for one in self._coming.get(worker.address, ()) if not one.is_over()
        ]
        ours = [max(0.0, one.at_s - now_s) for one in coming]
        # Other routers' are taken to come at once: nobody knows.
        num_others = max(0, status.num_waiting + status.num_awaiting_kv - len(ours))
        step_s = self.costs.worker(worker.address).step_s(
            Streams(status.num_running, streams.context)
        )
        return DecodeForecast(
            status.num_running,
            self.num_outputs * step_s,
            (*ours, *[0.0] * num_others),
            streams.context / max(1, streams.num),
        )

    def _room_s(self, worker: Worker, num_tokens: int, streams: Streams) -> float:
        """Until streams that run there have ended and left blocks enough, about."""
        status, blocks = worker.status, worker.status.blocks
        lacking = num_tokens // max(1, status.block_size) + 1 - blocks.free - blocks.cached
        if lacking <= 0 or not status.num_blocks or not streams.num:
            return 0.0
        each = max(1.0, (blocks.held + blocks.promised) / streams.num)
        stream_s = self.num_outputs * self.costs.worker(worker.address).step_s(streams)
        return lacking / each * stream_s / streams.num

    def _kind_of(self, address: str) -> bytes:
        return self._kinds.get(address, b"")


def _pace(worker: Worker) -> Pace:
    status = worker.status
    return Pace(status.token_budget or 1 << 30, status.step_slo_ms / 1000 or inf)
