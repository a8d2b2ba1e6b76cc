"""Measures a few steps before the first request, so that the cost model starts from this machine.

Prompts of nobody's run through a scheduler of their own, over the engine's pool and runner, on the
engine thread, before its loop begins:

1. Short and middling prompts, each of a length twice: the first step of a kind is often slow, for
   code is new and pages are cold.
2. Several at once that go on for a few tokens: decode steps, alone and in a batch.
3. All blocks are free again. Nothing enters the prefix cache, and no request is counted.

It ends early when its time is up: a slow machine is known by fewer steps.
"""

import time
from collections.abc import Callable, Iterator
from itertools import count
from typing import NamedTuple

from engine.block_pool import BlockPool
from engine.fork import sequences
from engine.model_runner import Runner
from engine.request import EngineRequest, Leg, RequestId, SamplingParams
from engine.scheduler import Scheduler
from engine.step_cost import StepCost
from engine.step_meter import StepMeter


class _Round(NamedTuple):
    num: int
    """Prompts at once."""
    prompt_len: int
    num_outputs: int = 1


_ROUNDS = (
    *(_Round(1, 32), _Round(1, 32), _Round(1, 128), _Round(1, 128), _Round(1, 256), _Round(4, 64)),
    *(_Round(1, 16, 8), _Round(4, 16, 8)),
)


def probe(
    pool: BlockPool,
    runner: Runner,
    cost: StepCost,
    *,
    token_budget: int,
    max_model_len: int,
    seconds: float,
    clock: Callable[[], float] = time.perf_counter,
) -> None:
    """`cost` learns. The pool is as it was. Raises what the runner raises."""
    end = clock() + seconds
    meter = StepMeter(cost, runner.is_async, clock)
    names = count()
    for num, prompt_len, num_outputs in _ROUNDS:
        if prompt_len + num_outputs > max_model_len:
            continue
        fits = pool.available // pool.blocks_for(prompt_len + num_outputs)
        scheduler = Scheduler(pool, token_budget, max_num_seqs=num, max_model_len=max_model_len)
        for _ in range(min(num, fits)):
            request = _request(prompt_len, num_outputs, names)
            scheduler.add(sequences(request, names, max_model_len))
        while scheduler.seqs and clock() < end:
            _step(scheduler, runner, meter)
        for seq in scheduler.seqs:
            scheduler.abort(seq.request_id)


def _step(scheduler: Scheduler, runner: Runner, meter: StepMeter) -> None:
    meter.begin()
    batch = scheduler.schedule()
    output = runner.run(batch.seqs)
    work = batch.work()
    scheduler.update(batch, output.token_ids)
    meter.end(work, is_waited_for=bool(output.token_ids))


def _request(prompt_len: int, num_outputs: int, names: Iterator[int]) -> EngineRequest:
    """Its tokens are of any vocabulary: the first few ids."""
    return EngineRequest(
        RequestId(f"probe-{next(names)}"),
        Leg.LOCAL,
        tuple(position % 7 for position in range(prompt_len)),
        SamplingParams(max_tokens=num_outputs, ignore_eos=True),
    )
