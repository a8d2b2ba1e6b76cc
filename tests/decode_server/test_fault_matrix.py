"""Every fault of the wire, before, during and after the transfer, with prompts of every kind of
length: each request ends in the tokens of one engine within its deadline, and leaves nothing.

Engines are real and the network is in the process; a test plays the router. A few dozen cases are
drawn, and with `--long` hundreds; the seed stands in the output, and BATON_FAULT_SEED repeats it.
"""

import asyncio
import itertools
import os
import random
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import pytest
from prometheus_client import CollectorRegistry

from decode_server.leg import DecodeLeg
from engine.errors import EngineError
from kvfabric.config import FabricConfig
from kvfabric.errors import FabricError
from kvfabric.fabric import Fabric
from kvfabric.faults import Fault
from tests.relay import DecodeEvents, Worker, running_leg, started_worker

NUM_OUTPUTS = 4
BLOCK, CHUNK = 16, 64
LENGTHS = (1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * CHUNK + 5, 480)
"""The last is four times what either budget of slots holds."""
KINDS = {
    "before": ("hello", "welcome", "offer"),
    "during": ("kv",),
    "after": ("commit", "abort", "void"),
}
MAX_TICKETS = 4
DEADLINE_S = 15.0
AT_ONCE = 16


class Case(NamedTuple):
    fault: Fault
    when: str
    length: int


CELLS = [Case(*cell) for cell in itertools.product(Fault, KINDS, LENGTHS)]


@dataclass
class Engines:
    prefill: Worker
    decode: Worker
    answers: dict[int, list[int]]
    """Of one engine, by the prompt's length."""


def prompt_of(length: int) -> list[int]:
    return random.Random(length).choices(range(17, 49152), k=length)


@pytest.fixture
async def engines(tiny_llama: Path) -> AsyncIterator[Engines]:
    with started_worker(tiny_llama) as prefill, started_worker(tiny_llama) as decode:
        answers = {}
        for length in LENGTHS:
            whole = decode.decode_leg(prompt_of(length), NUM_OUTPUTS, local=True, cache_salt="one")
            with running_leg(whole) as (events, task):
                await task
                answers[length] = events.token_ids
        yield Engines(prefill, decode, answers)


def rules_of(case: Case, draw: random.Random) -> str:
    """One fault where the case wants it, and now and then another one somewhere."""
    kind = draw.choice(KINDS[case.when])
    after = draw.randrange(1 + case.length // BLOCK) if kind == "kv" else 0
    rules = f"{kind}:{case.fault}:1:times=1:after={after}:seconds=0.02"
    if draw.random() < 0.3:
        rules += f",*:{draw.choice(list(Fault))}:0.05:times=2:seconds=0.02"
    return f"{rules},seed={draw.randrange(1 << 16)}"


@asynccontextmanager
async def harmed(engines: Engines, faults: str) -> AsyncIterator[tuple[Worker, Worker]]:
    """The two engines with fabrics of their own, which must hold nothing at the end."""
    quick = {"connect_timeout_s": 0.2, "send_timeout_s": 0.2, "transfer_timeout_s": 0.15}
    generations = itertools.count(next(_generations), 1)
    workers: list[Worker] = []
    for worker in (engines.prefill, engines.decode):
        config: FabricConfig = replace(
            worker.fabric.config,
            generation=next(generations),
            first_frame_timeout_s=0.6,
            faults=faults,
            **quick,  # type: ignore[arg-type]
        )
        staging = worker.engine.copier.allocate_staging(config.staging_nbytes)
        fabric = Fabric(config, staging)
        fabric.start()
        workers.append(replace(worker, fabric=fabric, registry=CollectorRegistry()))
    try:
        yield workers[0], workers[1]
        for worker in workers:
            await worker.assert_fabric_idle()
    finally:
        for worker in workers:
            await asyncio.to_thread(worker.fabric.close)


_generations: Iterator[int] = itertools.count(1000, 2)


async def relayed(prefill: Worker, decode: Worker, prompt: Sequence[int], salt: str) -> list[int]:
    """As a router does it: a prefill leg for each ticket; when one fails, another ticket; when too
    many have, decode computes the rest."""
    leg = decode.decode_leg(prompt, NUM_OUTPUTS, cache_salt=salt)
    with running_leg(leg) as (events, task):
        async with asyncio.timeout(DEADLINE_S):
            serving = asyncio.create_task(_serve_tickets(prefill, leg, events, prompt, salt))
            try:
                await task
            finally:
                serving.cancel()
                await asyncio.gather(serving, return_exceptions=True)
    return events.token_ids


async def _serve_tickets(
    prefill: Worker, leg: DecodeLeg, events: DecodeEvents, prompt: Sequence[int], salt: str
) -> None:
    for number in itertools.count():
        await events.until(lambda: len(events.tickets) > number)  # noqa: B023
        ticket = events.tickets[number]
        if number >= MAX_TICKETS:
            leg.renew(ticket.transfer_id, "no_prefill_worker")
            continue
        try:
            await prefill.prefill_leg(prompt, NUM_OUTPUTS, ticket, cache_salt=salt).run(_unheard)
        except (FabricError, EngineError):
            leg.renew(ticket.transfer_id)


async def _unheard(event: object) -> None:
    """Of a prefill leg; its failure is what counts."""


async def run_case(engines: Engines, case: Case, faults: str, number: int) -> None:
    async with harmed(engines, faults) as (prefill, decode):
        salt = f"case-{number}"
        tokens = await relayed(prefill, decode, prompt_of(case.length), salt)
        assert tokens == engines.answers[case.length], (case, faults)


async def run_cases(engines: Engines, count: int) -> None:
    seed = int(os.environ.get("BATON_FAULT_SEED") or random.randrange(1 << 32))
    print(f"BATON_FAULT_SEED={seed}")
    draw = random.Random(seed)
    cases = draw.sample(CELLS, len(CELLS)) + draw.choices(CELLS, k=max(0, count - len(CELLS)))
    cases = cases[:count]
    for first in range(0, count, AT_ONCE):
        some = cases[first : first + AT_ONCE]
        await asyncio.gather(
            *(
                run_case(engines, case, rules_of(case, draw), first + i)
                for i, case in enumerate(some)
            )
        )
        await engines.prefill.assert_all_back()
        await engines.decode.assert_all_back()


async def test_a_sample_of_the_matrix(engines: Engines) -> None:
    await run_cases(engines, 64)


@pytest.mark.long
@pytest.mark.timeout(600)
async def test_the_whole_matrix_and_more_at_random(engines: Engines) -> None:
    await run_cases(engines, 900)
