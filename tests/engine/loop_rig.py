"""An engine loop around a fake runner, heard by a listener."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from engine.block_pool import BlockPool
from engine.engine_loop import EngineLoop
from engine.prefix_cache import PrefixCache
from engine.request import EngineRequest, Reserved
from engine.scheduler import Scheduler
from tests.engine.fake_runner import FakeRunner
from tests.engine.listener import Listener

DEADLINE_S = 20.0


@dataclass
class Rig:
    loop: EngineLoop
    runner: FakeRunner
    listener: Listener

    def wait_free(self) -> None:
        """All blocks come home, and the loop finds that nothing leaked."""
        deadline = time.monotonic() + DEADLINE_S
        turns = self.loop.stats().turns
        while self.loop.stats().blocks.unused != self.loop.num_blocks or (
            self.loop.stats().turns < turns + 2
        ):
            assert self.loop.failure is None
            assert not self.loop.stats().ledger_violations
            assert time.monotonic() < deadline, self.loop.stats()
            time.sleep(0.01)

    def reserve_and_claim(self, request: EngineRequest) -> list[int]:
        """Plays a transfer: the block table with the prompt's KV in it."""
        self.loop.submit(request)
        self.listener.wait_for(Reserved, request.request_id)
        lease = self.loop.claim(request.request_id).result(DEADLINE_S)
        lease.enter()
        self.runner.write(lease.block_table, 0, list(request.prompt_token_ids))
        lease.exit()
        return [int(block_id) for block_id in lease.block_table]


def build_rig(
    num_blocks: int = 64,
    token_budget: int = 16,
    max_num_seqs: int = 8,
    prefix_caching: bool = False,
    max_queue_s: float | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Rig:
    listener, runner = Listener(), FakeRunner(block_size=4)
    pool = BlockPool(num_blocks, 4)
    cache = PrefixCache(pool, b"fingerprint") if prefix_caching else None
    scheduler = Scheduler(pool, token_budget, max_num_seqs, 1000, cache, max_queue_s=max_queue_s)
    loop = EngineLoop(scheduler, runner, listener, heartbeat_s=0.05, clock=clock)
    return Rig(loop, runner, listener)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
