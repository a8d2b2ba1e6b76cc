"""Logprobs and history-dependent sampling between real processes: what transformers says,
disaggregated, by one engine, and after either worker was killed in the middle."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM

from router.request import TokenLogprobs
from tests.e2e.cluster import MODEL_NAME, Cluster
from tests.e2e.slow_relay import (
    NUM_OUTPUTS,
    first,
    is_decoding,
    is_prefilling,
    is_receiving,
    of_role,
    prompt_of,
    relay_client,
)
from tests.e2e.tokens import Told, token_client

TOLERANCE = 1e-4
SAMPLING: dict[str, Any] = {
    "temperature": 0.7,
    "seed": 11,
    "min_p": 0.01,
    "repetition_penalty": 1.2,
    "frequency_penalty": 0.5,
    "num_logprobs": 4,
}


async def by_one_engine(cluster: Cluster, prompt: Sequence[int], max_tokens: int) -> Told:
    async with token_client([], of_role(cluster, "decode"), mode="colocated") as client:
        return await client.told(prompt, max_tokens, cache_salt="undisturbed", **SAMPLING)


def same(one: Told, other: Told) -> None:
    assert one.token_ids == other.token_ids
    assert len(one.logprobs) == len(other.logprobs) == len(one.token_ids)
    for a, b in zip(one.logprobs, other.logprobs, strict=True):
        assert a.logprob == pytest.approx(b.logprob, abs=TOLERANCE)
        assert (a.rank, [i for i, _ in a.top]) == (b.rank, [i for i, _ in b.top])


def is_of(entry: TokenLogprobs, row: torch.Tensor, token_id: int) -> None:
    """`row`: [vocab] what transformers says."""
    assert entry.logprob == pytest.approx(row[token_id].item(), abs=TOLERANCE)
    for top_id, logprob in entry.top:
        assert logprob == pytest.approx(row[top_id].item(), abs=TOLERANCE)
    assert [i for i, _ in entry.top] == row.topk(len(entry.top)).indices.tolist()


async def test_they_are_what_transformers_says(cluster: Cluster, tiny_llama: Path) -> None:
    prompt = prompt_of(21, 90)
    async with relay_client(cluster) as client:
        told = await client.told(prompt, 12, **SAMPLING)
        one = await client.told(prompt, 1, **SAMPLING)
    same(told, await by_one_engine(cluster, prompt, 12))
    assert one.token_ids == told.token_ids[:1]
    assert one.logprobs[0].logprob == pytest.approx(told.logprobs[0].logprob, abs=TOLERANCE)
    model = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *told.token_ids]])).logits[0, len(prompt) - 1 : -1]
    for row, token_id, entry in zip(
        logits.log_softmax(-1), told.token_ids, told.logprobs, strict=True
    ):
        is_of(entry, row, token_id)


async def test_decode_killed_in_mid_stream(cluster: Cluster) -> None:
    prompt = prompt_of(22, 100)
    expected = await by_one_engine(cluster, prompt, NUM_OUTPUTS)
    async with relay_client(cluster) as client:
        answer = asyncio.create_task(client.told(prompt, NUM_OUTPUTS, **SAMPLING))
        victim = await first(of_role(cluster, "decode"), is_decoding)
        victim.kill()
        same(await answer, expected)
        assert client.retries("decode") == 1


async def test_prefill_killed_in_mid_transfer(cluster: Cluster) -> None:
    prompt = prompt_of(23)
    expected = await by_one_engine(cluster, prompt, 8)
    async with relay_client(cluster) as client:
        answer = asyncio.create_task(client.told(prompt, 8, **SAMPLING))
        await first(of_role(cluster, "decode"), is_receiving)
        victim = await first(of_role(cluster, "prefill"), is_prefilling)
        victim.kill()
        same(await answer, expected)


async def test_prompt_logprobs_when_prefill_is_killed(cluster: Cluster, tiny_llama: Path) -> None:
    """What the dead worker had told stands; the next tells the rest."""
    prompt = prompt_of(25)
    async with relay_client(cluster) as client:
        answer = asyncio.create_task(client.told(prompt, 3, num_prompt_logprobs=3))
        await first(of_role(cluster, "decode"), is_receiving)
        victim = await first(of_role(cluster, "prefill"), is_prefilling)
        victim.kill()
        told = await answer
    assert len(told.prompt_logprobs) == len(prompt) - 1
    model = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)
    with torch.inference_mode():
        logits = model(torch.tensor([prompt])).logits[0, :-1]
    for row, token_id, entry in zip(
        logits.log_softmax(-1), prompt[1:], told.prompt_logprobs, strict=True
    ):
        is_of(entry, row, token_id)


async def test_over_http(cluster: Cluster) -> None:
    async with httpx.AsyncClient(base_url=cluster.routers[0].url, timeout=30) as http:
        body = {
            "model": MODEL_NAME,
            "prompt": prompt_of(24, 40),
            "max_tokens": 5,
            "ignore_eos": True,
            "temperature": 0,
            "logprobs": 3,
            "frequency_penalty": 1.5,
        }
        choice = (await http.post("/v1/completions", json=body)).raise_for_status().json()
        told = choice["choices"][0]["logprobs"]
        assert len(told["tokens"]) == len(told["token_logprobs"]) == 5
        assert all(value <= 0 for value in told["token_logprobs"])
        choice = (await http.post("/v1/completions", json={**body, "echo": True})).json()
        echoed = choice["choices"][0]["logprobs"]
        assert echoed["token_logprobs"][0] is None
        assert echoed["token_logprobs"][40:] == pytest.approx(told["token_logprobs"], abs=TOLERANCE)
        forced = {**body, "allowed_token_ids": [333], "logprobs": 0}
        reply = (await http.post("/v1/completions", json=forced)).raise_for_status().json()
        assert len(set(reply["choices"][0]["logprobs"]["tokens"])) == 1
        refusal = await http.post("/v1/completions", json={**body, "logit_bias": {"49152": 1}})
        assert refusal.status_code == 400
        assert refusal.json()["error"]["param"] == "logit_bias"
