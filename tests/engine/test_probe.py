"""The probe teaches the cost model what steps take, and leaves nothing behind."""

import pytest

from engine.block_pool import BlockPool
from engine.probe import probe
from engine.sequence import Sequence
from engine.step_cost import StepCost, step_work
from tests.engine.fake_runner import FakeRunner

WEIGHTS = (0.004, 0.0005, 1e-6, 0.001, 1e-7)


class Machine:
    """Takes as long as its weights say, by a clock of its own."""

    def __init__(self, slowness: float = 1.0) -> None:
        self.now_s = 0.0
        self.slowness = slowness
        self.num_steps = 0
        self.runner = FakeRunner(block_size=16)
        self.runner.before_step = self._step
        self.runner.start()

    def _step(self, seqs: list[Sequence]) -> None:
        work = step_work((seq.num_computed_tokens, seq.num_scheduled_tokens) for seq in seqs)
        taken_s = sum(w * x for w, x in zip(WEIGHTS, work, strict=True))
        # The first steps meet cold caches.
        self.now_s += taken_s * self.slowness * (5 if self.num_steps == 0 else 1)
        self.num_steps += 1


def probed(machine: Machine, pool: BlockPool, seconds: float, max_model_len: int = 512) -> StepCost:
    cost = StepCost()
    settings = {"token_budget": 512, "max_model_len": max_model_len}
    probe(pool, machine.runner, cost, seconds=seconds, clock=lambda: machine.now_s, **settings)
    pool.check()
    assert pool.ledger().free == pool.num_blocks
    assert pool.journal.next_change == 0  # no cache has heard of it
    return cost


def test_what_it_says_then_holds_for_other_steps() -> None:
    machine = Machine()
    cost = probed(machine, BlockPool(64, 16), seconds=10.0)
    assert cost.knows_prefill
    for parts in ([(0, 200)], [(0, 400)], [(100, 1)], [(0, 64), (50, 1), (60, 1)]):
        work = step_work(parts)
        expected = sum(w * x for w, x in zip(WEIGHTS, work, strict=True))
        assert cost.predict(work) == pytest.approx(expected, rel=0.2)


def test_a_slow_machine_is_not_kept_from_its_work() -> None:
    machine = Machine(slowness=100.0)
    cost = probed(machine, BlockPool(64, 16), seconds=1.0)
    assert machine.num_steps == 1
    assert not cost.knows_prefill
    machine = Machine(slowness=5.0)
    probed(machine, BlockPool(64, 16), seconds=2.0)
    assert machine.now_s < 2.0 + 5 * 0.3


@pytest.mark.parametrize(("num_blocks", "max_model_len"), [(2, 32), (8, 120), (1, 4)])
def test_a_small_pool_is_enough(num_blocks: int, max_model_len: int) -> None:
    machine = Machine()
    probed(machine, BlockPool(num_blocks, 16), 10.0, max_model_len)
