"""Workers of several ranks, between real processes over UCX: prefill and decode each with one rank
or two. Tokens are those of transformers; decode computes no prompt token; each rank receives the KV
of its own heads and of no other; and what fails half-way is given back on all ranks.

One cluster serves all tests.
"""

import asyncio
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from engine.config import ModelConfig
from tests.e2e.cluster import Cluster, Metrics, WorkerProcess, children_of
from tests.e2e.reference import Reference, prompts_of
from tests.e2e.slow_relay import first, is_receiving
from tests.e2e.tokens import token_client

NUM_OUTPUTS = 6
CHUNK = 16
LONG = 480
"""Tokens of a prompt that takes dozens of steps, so that its transfer has a middle."""
LENGTHS = (1, 2, 15, 16, 17, 63, 64, 65, 200, 300)
RANKS = (1, 2)
PAIRS = [(prefill, decode) for prefill in RANKS for decode in RANKS]


@dataclass
class Relay:
    cluster: Cluster
    workers: dict[tuple[str, int], WorkerProcess]
    expected: Reference
    token_nbytes: int


@pytest.fixture(scope="module")
def relay(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Relay]:
    cluster = Cluster(
        tmp_path_factory.mktemp("ranks"),
        tiny_llama,
        dtype="float32",
        num_blocks=200,
        max_model_len=512,
        token_budget=CHUNK,
        slot_size=16 << 10,
        kernels="torch",
    )
    try:
        workers = {
            (role, ranks): cluster.worker(
                role, tensor_parallel=ranks, block_size=16 * ranks, cores=cores
            )
            for role, cores in (("prefill", 0), ("decode", 1))
            for ranks in reversed(RANKS)  # of equals, the router takes the first
        }
        expected = Reference(tiny_llama, NUM_OUTPUTS)
        cluster.wait_ready()
        nbytes = ModelConfig.from_folder(tiny_llama).kv_token_nbytes(torch.float32)
        yield Relay(cluster, workers, expected, nbytes)
    finally:
        cluster.close()


def grown(after: Metrics, before: Metrics, name: str, **labels: str) -> float:
    return after.value(name, **labels) - before.value(name, **labels)


@pytest.mark.parametrize(("prefill_ranks", "decode_ranks"), PAIRS)
async def test_relayed_tokens_are_those_of_transformers(
    relay: Relay, prefill_ranks: int, decode_ranks: int
) -> None:
    prefill = relay.workers["prefill", prefill_ranks]
    decode = relay.workers["decode", decode_ranks]
    prompts = prompts_of(LENGTHS, seed=10 * prefill_ranks + decode_ranks)
    before = {worker.name: worker.metrics() for worker in (prefill, decode)}
    async with token_client([prefill], [decode]) as client:
        answers = await asyncio.gather(
            *(client.generate(prompt, NUM_OUTPUTS) for prompt in prompts)
        )
        assert client.retries("prefill") == client.retries("decode") == 0
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer == relay.expected(prompt), f"a prompt of {len(prompt)} tokens"
    relay.cluster.assert_all_back()
    after = {worker.name: worker.metrics() for worker in (prefill, decode)}
    tokens = "baton_prompt_tokens_total"
    assert grown(after[decode.name], before[decode.name], tokens, source="computed") == 0
    assert grown(after[decode.name], before[decode.name], tokens, source="received") == sum(LENGTHS)
    for worker, direction in ((prefill, "sent"), (decode, "received")):
        nbytes = grown(
            after[worker.name], before[worker.name], "baton_handoff_bytes_total",
            direction=direction,
        )  # fmt: skip
        assert nbytes == sum(LENGTHS) * relay.token_nbytes
    assert_each_rank_moved_its_heads(relay, prefill, prefill_ranks, "sent", before, after)
    assert_each_rank_moved_its_heads(relay, decode, decode_ranks, "received", before, after)


def assert_each_rank_moved_its_heads(
    relay: Relay,
    worker: WorkerProcess,
    num_ranks: int,
    direction: str,
    before: dict[str, Metrics],
    after: dict[str, Metrics],
) -> None:
    """The tiny model has two KV heads."""
    for rank in map(str, range(num_ranks)):
        nbytes = grown(
            after[worker.name], before[worker.name], "baton_rank_handoff_bytes_total",
            rank=rank, direction=direction,
        )  # fmt: skip
        assert nbytes == sum(LENGTHS) * relay.token_nbytes / num_ranks


async def killed_rank(worker: WorkerProcess) -> None:
    """kill -9 of the rank beside rank 0: the worker ends at once, and is started again."""
    (rank,) = children_of(worker.pid)
    os.kill(rank, signal.SIGKILL)
    await first([worker], lambda worker: not worker.is_running, within_s=5)


@pytest.fixture
def mended(relay: Relay) -> Iterator[Relay]:
    """All workers alive before, and nothing held after, on any rank of those that live."""
    for worker in relay.workers.values():
        if not worker.is_running:
            worker.start_again()
            worker.wait_ready()
    yield relay
    relay.cluster.assert_all_back()


async def test_aborted_in_mid_transfer(mended: Relay) -> None:
    prefill, decode = mended.workers["prefill", 2], mended.workers["decode", 2]
    (prompt,) = prompts_of((LONG,), seed=1)
    async with token_client([prefill], [decode]) as client:
        answer = asyncio.create_task(client.generate(prompt, NUM_OUTPUTS))
        await first([decode], is_receiving)
        answer.cancel()
        await asyncio.wait([answer])
        assert answer.cancelled()
        await asyncio.to_thread(mended.cluster.assert_all_back)
        assert await client.generate(prompt, NUM_OUTPUTS) == mended.expected(prompt)


async def test_prefill_rank_killed_in_mid_transfer(mended: Relay) -> None:
    """What is installed is kept; with no prefill worker left, decode computes the rest."""
    prefill, decode = mended.workers["prefill", 2], mended.workers["decode", 2]
    (prompt,) = prompts_of((LONG,), seed=2)
    before = decode.metrics()
    async with token_client([prefill], [decode]) as client:
        answer = asyncio.create_task(client.generate(prompt, NUM_OUTPUTS))
        await first([decode], is_receiving)
        await killed_rank(prefill)
        assert await answer == mended.expected(prompt)
    name = "baton_local_prefills_total"
    assert grown(decode.metrics(), before, name, reason="no_prefill_worker") == 1


async def test_decode_rank_killed_in_mid_transfer(mended: Relay) -> None:
    """The same request goes to another decode worker."""
    prefill, victim, other = (
        mended.workers[name] for name in (("prefill", 2), ("decode", 2), ("decode", 1))
    )
    (prompt,) = prompts_of((LONG,), seed=3)
    async with token_client([prefill], [victim, other]) as client:
        answer = asyncio.create_task(client.generate(prompt, NUM_OUTPUTS))
        assert await first([victim, other], is_receiving) is victim
        await killed_rank(victim)
        assert await answer == mended.expected(prompt)
        assert client.retries("decode") == 1
