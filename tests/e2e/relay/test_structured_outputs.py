"""Structured outputs between real processes: what they say fits, disaggregated, by one engine, and
after either worker was killed in the middle; bombs are refused while a stream flows."""

import asyncio
import json
import re
import time
from typing import Any

import httpx
import pytest

from runtime.grammar import of_json_schema
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
from tests.e2e.tokens import token_client
from tests.grammars import FORMS, Form
from tests.router.bombs import BOMBS
from tests.router.fake_workers import until

LONG = {"type": "array", "items": {"type": "integer"}, "minItems": 1000}
"""Nothing that is said under it comes to an end by itself before it is cut off."""
SAMPLING: dict[str, Any] = {
    "temperature": 1.0,
    "seed": 12,
    "grammar": of_json_schema(LONG, {"whitespace_pattern": " "}),
}


async def by_one_engine(cluster: Cluster, prompt: list[int], max_tokens: int) -> list[int]:
    async with token_client([], of_role(cluster, "decode"), mode="colocated") as client:
        told = await client.told(prompt, max_tokens, cache_salt="undisturbed", **SAMPLING)
        return told.token_ids


async def test_decode_killed_in_mid_stream(cluster: Cluster) -> None:
    prompt = prompt_of(32, 100)
    expected = await by_one_engine(cluster, prompt, NUM_OUTPUTS)
    async with relay_client(cluster) as client:
        answer = asyncio.create_task(client.told(prompt, NUM_OUTPUTS, **SAMPLING))
        victim = await first(of_role(cluster, "decode"), is_decoding)
        victim.kill()
        assert (await answer).token_ids == expected
        assert client.retries("decode") == 1


async def test_prefill_killed_in_mid_transfer(cluster: Cluster) -> None:
    prompt = prompt_of(33)
    expected = await by_one_engine(cluster, prompt, 8)
    async with relay_client(cluster) as client:
        answer = asyncio.create_task(client.told(prompt, 8, **SAMPLING))
        await first(of_role(cluster, "decode"), is_receiving)
        victim = await first(of_role(cluster, "prefill"), is_prefilling)
        victim.kill()
        assert (await answer).token_ids == expected


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
async def test_over_http_every_form_fits(cluster: Cluster, form: Form, temperature: int) -> None:
    async with httpx.AsyncClient(base_url=cluster.routers[0].url, timeout=30) as http:
        body = {
            "model": MODEL_NAME,
            "messages": [{"role": "user", "content": "Say anything."}],
            "max_tokens": 200,
            "seed": 5,
            "temperature": temperature,
            **form.fields,
        }
        reply = (await http.post("/v1/chat/completions", json=body)).raise_for_status().json()
        (choice,) = reply["choices"]
        if choice["finish_reason"] == "stop":
            form.check(choice["message"]["content"])
        else:
            assert not form.is_bounded


async def test_bombs_are_refused_while_a_stream_flows(cluster: Cluster) -> None:
    gaps: list[float] = []
    async with httpx.AsyncClient(base_url=cluster.routers[0].url, timeout=30) as http:
        stream = asyncio.create_task(_watch(http, gaps))
        await until(lambda: bool(gaps), timeout_s=10)
        num_before = len(gaps)
        for name, fields in BOMBS.items():
            began = time.monotonic()
            body = {"model": MODEL_NAME, "prompt": "Hi", **fields}
            response = await http.post("/v1/completions", json=body)
            assert response.status_code == 400, name
            assert time.monotonic() - began < 1.0, name
            if stream.done():
                stream = asyncio.create_task(_watch(http, gaps))
        await stream
    assert len(gaps) > num_before + 20
    assert max(gaps) < 1.0


async def _watch(http: httpx.AsyncClient, gaps: list[float]) -> None:
    """A stream's pauses, and that what it said is the beginning of what was asked."""
    body = {
        "model": MODEL_NAME,
        "prompt": "Hi",
        "max_tokens": 400,
        "stream": True,
        "structured_outputs": {"json": LONG, "disable_any_whitespace": True},
    }
    said, last = "", time.monotonic()
    async with http.stream("POST", "/v1/completions", json=body) as response:
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                said += json.loads(line[6:])["choices"][0]["text"]
                gaps.append(time.monotonic() - last)
                last = time.monotonic()
    assert re.fullmatch(r"\[(-?(0|[1-9][0-9]*),)*-?[0-9]*", said), said
