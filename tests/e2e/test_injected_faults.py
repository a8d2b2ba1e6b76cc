"""Faults of the wire, injected into real workers: each costs a retry, and never an answer."""

import asyncio
import os
import random
from collections.abc import Sequence

import pytest

from kvfabric.faults import ANY, KINDS, Fault
from router.errors import ApiError
from tests.e2e.harmed import HarmedCluster
from tests.e2e.slow_relay import of_role, prompt_of, relay_client, undisturbed
from tests.e2e.soak import assert_no_more_threads_or_files, soak
from tests.e2e.tokens import TokenClient

NUM_PROMPTS = 24
NUM_OUTPUTS = 8
FAULTS = (
    "kv:drop:0.02,kv:delay:0.1:seconds=0.02,kv:duplicate:0.05,kv:reorder:0.05,kv:corrupt:0.03,"
    "kv:truncate:0.01,kv:stall:0.01,kv:kill:0.01,commit:drop:0.03,commit:kill:0.03,"
    "commit:corrupt:0.03,offer:drop:0.02,offer:duplicate:0.03,abort:drop:0.2,welcome:drop:0.1"
)
LENGTHS = (1, 15, 16, 17, 120, 500)
AT_ONCE = 4
NUM_PLANS = int(os.environ.get("BATON_FAULT_PLANS") or 120)
"""Of the long test; fewer at a time, each with a seed of its own, take as long in pieces."""
DEADLINE_S = 45.0
"""For all prompts of a plan; a retry waits for up to five seconds of silence."""


async def test_every_answer_is_right_under_faults_of_the_wire(harmed: HarmedCluster) -> None:
    prompts = [prompt_of(50 + index, 60 + 25 * index) for index in range(NUM_PROMPTS)]
    expected = [await undisturbed(harmed, prompt, NUM_OUTPUTS) for prompt in prompts]
    harmed.harm(FAULTS)
    async with relay_client(harmed) as client:
        for first in range(0, NUM_PROMPTS, 8):
            some = slice(first, first + 8)
            answers = await asyncio.gather(
                *(client.generate(prompt, NUM_OUTPUTS, cache_salt="x") for prompt in prompts[some])
            )
            assert answers == expected[some]
    harmed.harm("")
    lost = sum(
        count
        for worker in of_role(harmed, "decode")
        for (name, _), count in worker.metrics().items()
        if name == "baton_transfers_lost_total"
    )
    assert lost > 0, "some faults did cost a transfer"
    await asyncio.to_thread(harmed.assert_all_back, 6.0)


def drawn_plan(draw: random.Random) -> str:
    """One to three rules: now and then some message or other, or the next few of one kind."""
    rules = []
    for _ in range(draw.randint(1, 3)):
        rule = f"{draw.choice((*KINDS, ANY))}:{draw.choice(list(Fault))}"
        if draw.random() < 0.5:
            rule += f":{draw.choice((0.02, 0.1, 0.3))}"
        else:
            rule += f":1:times={draw.randint(1, 4)}:after={draw.randrange(4)}"
        rules.append(f"{rule}:seconds={draw.choice((0.01, 0.1, 0.5))}")
    return ",".join(rules)


async def answer_or_refusal(client: TokenClient, length: int, salt: str) -> list[int] | ApiError:
    try:
        return await client.generate(prompt_of(length, length), NUM_OUTPUTS, cache_salt=salt)
    except ApiError as error:
        return error


async def run_plans(harmed: HarmedCluster, count: int) -> None:
    """Each with some prompts at once. A plan may be of the kind that nothing comes through: then
    it is said so. What is said is right, and nothing is held after any of them."""
    seed = int(os.environ.get("BATON_FAULT_SEED") or random.randrange(1 << 32))
    print(f"BATON_FAULT_SEED={seed}")
    draw = random.Random(seed)
    expected = {n: await undisturbed(harmed, prompt_of(n, n), NUM_OUTPUTS) for n in LENGTHS}
    num_refused = 0
    async with relay_client(harmed) as client:
        for number in range(count):
            plan, lengths = drawn_plan(draw), draw.choices(LENGTHS, k=AT_ONCE)
            harmed.harm(plan, seed=draw.randrange(1 << 16))
            async with asyncio.timeout(DEADLINE_S):
                told = await asyncio.gather(
                    *(
                        answer_or_refusal(client, length, f"{seed}-{number}-{index}")
                        for index, length in enumerate(lengths)
                    )
                )
            harmed.harm("")
            num_refused += check(told, [expected[length] for length in lengths], plan)
            await asyncio.to_thread(harmed.assert_all_back, 6.0)
    print(f"{count} plans, {count * AT_ONCE} prompts, {num_refused} refused")
    assert num_refused <= count * AT_ONCE // 20


def check(told: Sequence[list[int] | ApiError], expected: Sequence[list[int]], plan: str) -> int:
    """How many were refused."""
    for answer, right in zip(told, expected, strict=True):
        if isinstance(answer, ApiError):
            assert (answer.status, bool(answer.message)) == (503, True), (answer, plan)
        else:
            assert answer == right, plan
    return sum(isinstance(answer, ApiError) for answer in told)


async def test_some_random_plans(harmed: HarmedCluster) -> None:
    await run_plans(harmed, 4)


@pytest.mark.long
@pytest.mark.timeout(1800)
async def test_a_hundred_random_plans(harmed: HarmedCluster) -> None:
    await run_plans(harmed, NUM_PLANS)


async def test_no_thread_or_file_is_left_by_mixed_load(harmed: HarmedCluster) -> None:
    """Ten seconds; ten minutes, and memory: test_steady.py."""
    assert_no_more_threads_or_files(await soak(harmed, 10.0))
