"""Minutes of faults under load: workers are killed and frozen one after the other, at random, while
requests keep coming. Every answer is right; at the end nothing is held. Dated results of this test
stand in docs/log.md.
"""

import asyncio
import random
import time

import pytest

from tests.e2e.cluster import Cluster
from tests.e2e.slow_relay import (
    INACTIVITY_S,
    prompt_of,
    relay_client,
    undisturbed,
)
from tests.e2e.tokens import TokenClient

SOAK_S = 180.0
NUM_CLIENTS = 6
CASES = [(length, outputs) for length in (3, 16, 100, 400) for outputs in (1, 10, 60)]


async def ask_until(
    end: float, draw: random.Random, client: TokenClient, expected: dict[int, list[int]]
) -> int:
    """Random cases until the time is over; how many were answered, all rightly."""
    num_answered = 0
    while time.monotonic() < end:
        case = draw.randrange(len(CASES))
        length, num_outputs = CASES[case]
        answer = await client.generate(prompt_of(case, length), num_outputs)
        assert answer == expected[case], f"case {CASES[case]}"
        num_answered += 1
    return num_answered


async def break_until(end: float, draw: random.Random, cluster: Cluster) -> int:
    """One fault at a time; the next when the worker is back. How many."""
    num_faults = 0
    while time.monotonic() < end:
        worker = draw.choice(cluster.workers)
        await asyncio.sleep(draw.uniform(0.2, 2.0))
        if draw.random() < 0.6:
            worker.kill()
            worker.start_again()
        else:
            worker.freeze()
            await asyncio.sleep(draw.uniform(0.1, 2 * INACTIVITY_S))
            worker.thaw()
        await asyncio.to_thread(worker.wait_ready)
        num_faults += 1
    return num_faults


@pytest.mark.long
@pytest.mark.timeout(SOAK_S + 120)
async def test_faults_under_load_cost_no_answer(cluster: Cluster) -> None:
    draw = random.Random(11)
    expected = {
        case: await undisturbed(cluster, prompt_of(case, length), num_outputs)
        for case, (length, num_outputs) in enumerate(CASES)
    }
    end = time.monotonic() + SOAK_S
    async with relay_client(cluster) as client:
        faults = asyncio.create_task(break_until(end, draw, cluster))
        answered = await asyncio.gather(
            *(ask_until(end, random.Random(i), client, expected) for i in range(NUM_CLIENTS))
        )
        print(
            f"{await faults} faults, {sum(answered)} answers, retries: "
            f"{client.retries('prefill'):.0f} prefill, {client.retries('decode'):.0f} decode"
        )
    assert min(answered) > 0
