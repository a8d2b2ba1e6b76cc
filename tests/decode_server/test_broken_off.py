"""A transfer that breaks off, and a decode leg that computes what has not come."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from kvfabric.errors import FabricError
from protos import serving_pb2 as pb
from tests.decode_server.test_leg import PROMPT, Relay, frames_received, ticket
from tests.relay import DecodeEvents, run_prefill, running_leg, started_worker

NUM_OUTPUTS = 6


@pytest.fixture
async def relay(tiny_llama: Path) -> AsyncIterator[Relay]:
    with started_worker(tiny_llama) as prefill, started_worker(tiny_llama) as decode:
        yield Relay(prefill, decode)
        await prefill.assert_all_back()
        await decode.assert_all_back()


def local_prefills(relay: Relay, reason: str) -> float:
    return relay.decode.value("baton_local_prefills_total", reason=reason)


async def begin_prefill(
    relay: Relay, events: DecodeEvents
) -> tuple[pb.KVTicket, "asyncio.Task[object]"]:
    """Until some frames are installed."""
    minted = await ticket(events)
    leg = relay.prefill.prefill_leg(PROMPT, NUM_OUTPUTS, minted)
    prefill: asyncio.Task[object] = asyncio.create_task(run_prefill(leg))
    await frames_received(relay, 2)
    return minted, prefill


@pytest.mark.parametrize(
    "sampling", [{}, {"temperature": 1.0, "seed": 5}], ids=["greedy", "sampled"]
)
async def test_without_a_prefill_worker_only_the_tail_is_computed(
    relay: Relay, sampling: dict[str, Any]
) -> None:
    whole = relay.decode.decode_leg(PROMPT, NUM_OUTPUTS, local=True, cache_salt="alone", **sampling)
    with running_leg(whole) as (alone, task):
        await task
    before = relay.decode.engine.stats().prompt_tokens_computed
    leg = relay.decode.decode_leg(PROMPT, NUM_OUTPUTS, **sampling)
    with running_leg(leg) as (events, task):
        minted, prefill = await begin_prefill(relay, events)
        leg.renew(minted.transfer_id, "no_prefill_worker")
        with pytest.raises(FabricError):
            await prefill
        await task
    assert events.token_ids == alone.token_ids
    assert len(events.tickets) == 1
    computed = relay.decode.engine.stats().prompt_tokens_computed - before
    assert 0 < computed < len(PROMPT), "what had come was not computed again"
    assert local_prefills(relay, "no_prefill_worker") == 1


async def test_samples_fork_behind_a_tail_too(relay: Relay) -> None:
    others: list[tuple[int, ...]] = [(), ()]
    hot: dict[str, Any] = {"temperature": 1.0, "seed": 9}
    whole = relay.decode.decode_leg(
        PROMPT, NUM_OUTPUTS, local=True, cache_salt="alone", others=others, **hot
    )
    with running_leg(whole) as (alone, task):
        await task
    leg = relay.decode.decode_leg(PROMPT, NUM_OUTPUTS, others=others, **hot)
    with running_leg(leg) as (events, task):
        minted, prefill = await begin_prefill(relay, events)
        leg.renew(minted.transfer_id, "no_prefill_worker")
        await asyncio.gather(prefill, return_exceptions=True)
        await task
    for sample in range(3):
        assert events.tokens_of(sample) == alone.tokens_of(sample)


async def test_decode_chooses_the_tail_when_handoffs_are_slow(relay: Relay) -> None:
    expected = await relay.expected(PROMPT, NUM_OUTPUTS)
    for _ in range(4):  # the engine learns what its own prefills take
        await relay.expected(PROMPT, 1)
    relay.decode.tails.learn(100, 100 * 3.0)
    leg = relay.decode.decode_leg(PROMPT, NUM_OUTPUTS)
    with running_leg(leg) as (events, task):
        minted, prefill = await begin_prefill(relay, events)
        leg.renew(minted.transfer_id)
        await asyncio.gather(prefill, return_exceptions=True)
        await task
    assert events.token_ids == expected
    assert len(events.tickets) == 1
    assert local_prefills(relay, "cheaper_tail") == 1
    assert events[-1].finished.timings.local_prefill_reason == "cheaper_tail"


async def test_prompt_logprobs_come_from_one_side(relay: Relay) -> None:
    for _ in range(4):
        await relay.expected(PROMPT, 1)
    relay.decode.tails.learn(100, 100 * 3.0)
    leg = relay.decode.decode_leg(PROMPT, NUM_OUTPUTS, num_prompt_logprobs=1)
    with running_leg(leg) as (events, _):
        minted, prefill = await begin_prefill(relay, events)
        leg.renew(minted.transfer_id)
        await asyncio.gather(prefill, return_exceptions=True)
        assert (await ticket(events, 1)).replaces_lost
