"""Faults of the wire, injected into real workers: each costs a retry, and never an answer."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.cluster import Cluster
from tests.e2e.slow_relay import of_role, prompt_of, relay_client, undisturbed

NUM_PROMPTS = 24
NUM_OUTPUTS = 8
FAULTS = (
    "kv:drop:0.02,kv:delay:0.1:seconds=0.02,kv:duplicate:0.05,kv:reorder:0.05,kv:corrupt:0.03,"
    "kv:truncate:0.01,kv:stall:0.01,kv:kill:0.01,commit:drop:0.03,commit:kill:0.03,"
    "commit:corrupt:0.03,offer:drop:0.02,offer:duplicate:0.03,abort:drop:0.2,welcome:drop:0.1"
)


@pytest.fixture(scope="module")
def harmed(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = Cluster(
        tmp_path_factory.mktemp("injected"),
        tiny_llama,
        dtype="float32",
        num_blocks=400,
        slot_size=64 << 10,
        connect_timeout_s=1,
        send_timeout_s=1,
        first_frame_timeout_s=4,
        transfer_timeout_s=1,
    )
    try:
        for index, role in enumerate(("prefill", "prefill", "decode")):
            cluster.worker(role, cores=index % 2, inject_faults=f"{FAULTS},seed={index}")
        cluster.wait_ready()
        yield cluster
    finally:
        cluster.close()


async def test_every_answer_is_right_under_faults_of_the_wire(harmed: Cluster) -> None:
    prompts = [prompt_of(50 + index, 60 + 25 * index) for index in range(NUM_PROMPTS)]
    expected = [await undisturbed(harmed, prompt, NUM_OUTPUTS) for prompt in prompts]
    async with relay_client(harmed) as client:
        for first in range(0, NUM_PROMPTS, 8):
            some = slice(first, first + 8)
            answers = await asyncio.gather(
                *(client.generate(prompt, NUM_OUTPUTS, cache_salt="x") for prompt in prompts[some])
            )
            assert answers == expected[some]
    lost = sum(
        count
        for worker in of_role(harmed, "decode")
        for (name, _), count in worker.metrics().items()
        if name == "baton_transfers_lost_total"
    )
    assert lost > 0, "some faults did cost a transfer"
    await asyncio.to_thread(harmed.assert_all_back, 6.0)
