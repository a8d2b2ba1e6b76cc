"""What a worker pushes of a real engine, and that two who watch it agree."""

import asyncio
from pathlib import Path

from deploy.state_stream import StateStream
from deploy.worker_status import WorkerStatus
from protos import serving_pb2 as pb
from router.prefix_index import PrefixIndex, PromptBlocks
from runtime.duty import Duty
from tests.relay import started_worker

PROMPT = tuple(range(3, 103))


class Watcher:
    """Follows a stream as a router does."""

    def __init__(self, states: StateStream) -> None:
        self.index = PrefixIndex()
        self.last = pb.WorkerState()
        self.num_told = 0
        self._told = asyncio.Event()
        self.task = asyncio.create_task(states.watch(pb.ROLE_DECODE, self._request(), self._take))

    def _request(self) -> pb.WatchRequest:
        known = self.index
        return pb.WatchRequest(generation=known.generation, next_change=known.next_change)

    async def _take(self, state: pb.WorkerState) -> None:
        self.last = state
        self.num_told += 1
        if state.HasField("cache"):
            assert self.index.apply(state.status.generation, state.cache, state.status.num_blocks)
        self._told.set()

    async def told(self) -> None:
        """Something that was said after this was called."""
        async with asyncio.timeout(5):
            for _ in range(2):
                self._told.clear()
                await self._told.wait()


async def test_what_an_engine_does_is_pushed_and_two_agree_on_it(tiny_llama: Path) -> None:
    with started_worker(tiny_llama, num_blocks=24) as worker:
        duty = Duty("decode-0", ["decode"])
        status = WorkerStatus("decode-0", "tiny", worker.engine, worker.fabric, 9, duty)
        states = StateStream(worker.loop_side, status)
        first = Watcher(states)
        await worker.decode_leg(PROMPT, 4, local=True).run(lambda event: asyncio.sleep(0))
        await first.told()
        size = worker.engine.block_size
        blocks = PromptBlocks(PROMPT)
        num_full = (len(PROMPT) - 1) // size * size
        assert blocks.num_cached_tokens(first.index, worker.engine.fingerprint, size) == num_full
        assert first.last.steps.seconds > 0
        work = list(first.last.steps.work)
        assert work[0] >= 5  # steps
        assert work[1:4:2] == [3, len(PROMPT)]  # decodes, prefill tokens
        assert len(first.last.steps.weights) == len(work)
        # Others are evicted; a second watcher who comes now hears a snapshot of what is left.
        await worker.decode_leg(PROMPT[::-1] * 3, 2, local=True).run(lambda event: asyncio.sleep(0))
        second = Watcher(states)
        await asyncio.gather(first.told(), second.told())
        assert first.index == second.index
        assert len(first.index) == len(second.index) <= worker.engine.num_blocks
        assert first.last.status.blocks == second.last.status.blocks
        assert blocks.num_cached_tokens(first.index, worker.engine.fingerprint, size) < num_full
        duty.assign((), 1.0)
        states.stop()
        await asyncio.wait_for(asyncio.gather(first.task, second.task), 2)
        assert first.last.status.draining
        assert second.last.status.draining
        assert not worker.loop_side.watchers


async def test_an_idle_worker_is_not_silent_and_not_talkative(tiny_llama: Path) -> None:
    with started_worker(tiny_llama) as worker:
        duty = Duty("decode-0", ["decode"])
        status = WorkerStatus("decode-0", "tiny", worker.engine, worker.fabric, 9, duty)
        watcher = Watcher(StateStream(worker.loop_side, status))
        await asyncio.sleep(0.8)
        assert 2 <= watcher.num_told <= 5
        assert watcher.last.idle_ms < 700
        watcher.task.cancel()
        await asyncio.wait({watcher.task})
        assert not worker.loop_side.watchers
