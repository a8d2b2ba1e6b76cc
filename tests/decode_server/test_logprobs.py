"""Logprobs and history-dependent sampling between both services: disaggregated, local, resumed and
retried answers tell the same, and what transformers says."""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from protos import serving_pb2 as pb
from tests.decode_server.test_leg import PROMPT, ticket
from tests.relay import DecodeEvents, Worker, run_prefill, running_leg, started_worker

NUM_TOP = 5
NUM_OUTPUTS = 8
TOLERANCE = 1e-4
SAMPLING: dict[str, Any] = {
    "temperature": 0.8,
    "seed": 5,
    "repetition_penalty": 1.5,
    "frequency_penalty": 0.5,
    "min_p": 0.001,
    "bad_words": ((PROMPT[0],), (3, 4)),
    "stop_token_ids": frozenset(range(0, 49152, 2)),
    "min_tokens": NUM_OUTPUTS,
    "num_logprobs": 1 + NUM_TOP,
}


@dataclass
class Relay:
    prefill: Worker
    decode: Worker

    async def disaggregated(
        self, max_tokens: int, outputs: Sequence[int] = (), **sampling: Any
    ) -> tuple[DecodeEvents, list[pb.PrefillEvent]]:
        leg = self.decode.decode_leg(PROMPT, max_tokens, outputs, **sampling)
        with running_leg(leg) as (events, task):
            prefill = await run_prefill(
                self.prefill.prefill_leg(
                    PROMPT, max_tokens, await ticket(events), outputs, **sampling
                )
            )
            await task
        return events, prefill

    async def local(
        self, max_tokens: int, outputs: Sequence[int] = (), **sampling: Any
    ) -> DecodeEvents:
        leg = self.prefill.decode_leg(PROMPT, max_tokens, outputs, local=True, **sampling)
        with running_leg(leg) as (events, task):
            await task
        return events


@pytest.fixture
async def relay(tiny_llama: Path) -> AsyncIterator[Relay]:
    flags = {"prefix_caching": False}
    with (
        started_worker(tiny_llama, **flags) as prefill,
        started_worker(tiny_llama, **flags) as decode,
    ):
        yield Relay(prefill, decode)
        await prefill.assert_all_back()
        await decode.assert_all_back()


def same(one: Sequence[pb.TokenLogprobs], other: Sequence[pb.TokenLogprobs]) -> None:
    assert len(one) == len(other) > 0
    for a, b in zip(one, other, strict=True):
        assert a.logprob == pytest.approx(b.logprob, abs=TOLERANCE)
        assert a.rank == b.rank
        assert list(a.top_token_ids) == list(b.top_token_ids)
        assert list(a.top_logprobs) == pytest.approx(list(b.top_logprobs), abs=TOLERANCE)


async def test_disaggregated_is_as_local_and_as_resumed(relay: Relay) -> None:
    local = await relay.local(NUM_OUTPUTS, **SAMPLING)
    events, prefill = await relay.disaggregated(NUM_OUTPUTS, **SAMPLING)
    assert events.token_ids == local.token_ids
    assert len(events.token_ids) == NUM_OUTPUTS, "min_tokens holds off the stop ids"
    same(events.logprobs, local.logprobs)
    same([prefill[0].first_token.logprobs], local.logprobs[:1])  # token 0 to the router
    for count in (1, 5):
        delivered = local.token_ids[:count]
        resumed, _ = await relay.disaggregated(NUM_OUTPUTS, delivered, **SAMPLING)
        again = await relay.local(NUM_OUTPUTS, delivered, **SAMPLING)
        assert resumed.token_ids == again.token_ids == local.token_ids[count:]
        same(resumed.logprobs, local.logprobs[count:])
        same(again.logprobs, local.logprobs[count:])


async def test_one_token_without_a_transfer(relay: Relay) -> None:
    local = await relay.local(NUM_OUTPUTS, **SAMPLING)
    sampling = {**SAMPLING, "min_tokens": 1}
    prefill = await run_prefill(relay.prefill.prefill_leg(PROMPT, 1, None, **sampling))
    assert prefill[0].first_token.token_id == local.token_ids[0]
    same([prefill[0].first_token.logprobs], local.logprobs[:1])


async def test_they_are_what_transformers_says(relay: Relay, tiny_llama: Path) -> None:
    events, _ = await relay.disaggregated(NUM_OUTPUTS, **SAMPLING)
    model = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)
    with torch.inference_mode():
        logits = model(torch.tensor([[*PROMPT, *events.token_ids]])).logits[0, len(PROMPT) - 1 : -1]
    expected = logits.log_softmax(-1)
    for row, token_id, entry in zip(expected, events.token_ids, events.logprobs, strict=True):
        assert entry.logprob == pytest.approx(row[token_id].item(), abs=TOLERANCE)
        assert entry.rank == 1 + (row > row[token_id]).sum()
        top = row.topk(NUM_TOP)
        assert list(entry.top_token_ids) == top.indices.tolist()
        assert list(entry.top_logprobs) == pytest.approx(top.values.tolist(), abs=TOLERANCE)


async def test_a_lost_transfer_changes_nothing(relay: Relay) -> None:
    local = await relay.local(NUM_OUTPUTS, **SAMPLING)
    leg = relay.decode.decode_leg(PROMPT, NUM_OUTPUTS, **SAMPLING)
    with running_leg(leg) as (events, task):
        first = await ticket(events)
        leg.renew(first.transfer_id)
        second = await ticket(events, 1)
        await run_prefill(relay.prefill.prefill_leg(PROMPT, NUM_OUTPUTS, second, **SAMPLING))
        await task
    assert events.token_ids == local.token_ids
    same(events.logprobs, local.logprobs)


async def test_nobody_asks_nobody_is_told(relay: Relay) -> None:
    events, prefill = await relay.disaggregated(3)
    assert not events.logprobs
    assert not prefill[0].first_token.HasField("logprobs")


async def warm(relay: Relay) -> None:
    """The prompt's KV is cached on both workers."""
    await relay.local(1)
    leg = relay.decode.decode_leg(PROMPT, 1, local=True)
    with running_leg(leg) as (_, task):
        await task
    for worker in (relay.prefill, relay.decode):
        assert worker.engine.stats().blocks.cached > 0


async def test_prompt_logprobs_whatever_is_cached(tiny_llama: Path) -> None:
    """Of the prefill worker, chunk by chunk, before token 0; decode computes no prompt token."""
    with started_worker(tiny_llama) as prefill, started_worker(tiny_llama) as decode:
        relay = Relay(prefill, decode)
        await warm(relay)
        before = decode.engine.stats().prompt_tokens_computed
        events, told = await relay.disaggregated(3, num_prompt_logprobs=3)
        assert decode.engine.stats().prompt_tokens_computed == before
        assert not events.prompt_logprobs
        local = await relay.local(3, num_prompt_logprobs=3)
        one = await run_prefill(prefill.prefill_leg(PROMPT, 1, None, num_prompt_logprobs=3))
        kinds = [event.WhichOneof("event") for event in told]
        assert kinds == [*["prompt_logprobs"] * 4, "first_token", "shipped"]
        assert [event.prompt_logprobs.first_index for event in told[:4]] == [1, 65, 129, 193]
        assert events.token_ids == local.token_ids
        entries = [entry for event in told for entry in event.prompt_logprobs.logprobs]
        assert len(entries) == len(PROMPT) - 1
        same(entries, local.prompt_logprobs)
        same(entries, [entry for event in one for entry in event.prompt_logprobs.logprobs])
        await prefill.assert_all_back()
        await decode.assert_all_back()
    model = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)
    with torch.inference_mode():
        expected = model(torch.tensor([PROMPT])).logits[0, :-1].log_softmax(-1)
    for row, token_id, entry in zip(expected, PROMPT[1:], entries, strict=True):
        assert entry.logprob == pytest.approx(row[token_id].item(), abs=TOLERANCE)
        assert list(entry.top_token_ids) == row.topk(2).indices.tolist()
