"""Calls of tools that the real model is made to write, over the whole relay: it would hardly write
one by itself, and at a high temperature it raves."""

import asyncio
import json
from typing import Any

import httpx
import jsonschema
import pytest

from tests.e2e.cluster import MODEL_NAME, RouterProcess
from tests.e2e.equivalence.relay import Relay
from tests.e2e.equivalence.test_load import prompt_tokens
from tests.router.chat_answers import joined, without_ids

CITY: dict[str, Any] = {"type": "string", "maxLength": 20}
WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {"city": CITY, "unit": {"enum": ["C", "F"]}, "days": {"enum": [1, 2, 3]}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}
CITIES = {"type": "array", "items": CITY, "maxItems": 2}
TIME: dict[str, Any] = {
    "type": "object",
    "properties": {"cities": CITIES},
    "required": ["cities"],
    "additionalProperties": False,
}
SCHEMAS = {"get_weather": WEATHER, "get_time": TIME}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "Looks up.", "parameters": one}}
    for name, one in SCHEMAS.items()
]
WANTED = [("required", 0), ("required", 1.5), ("get_time", 1.5)]


@pytest.mark.parametrize("relay", ["smollm2"], indirect=True)
async def test_arguments_fit_by_construction(relay: Relay, router: RouterProcess) -> None:
    """And streamed or not, they are the same."""
    decodes = [worker for worker in relay.cluster.workers if worker.role == "decode"]
    before = [prompt_tokens(worker)[0] for worker in decodes]
    async with httpx.AsyncClient(base_url=router.url, timeout=60) as client:
        said = await asyncio.gather(
            *(
                client.post("/v1/chat/completions", json=body_of(wanted, temperature, stream))
                for wanted, temperature in WANTED
                for stream in (False, True)
            )
        )
    for (wanted, _), whole, streamed in zip(WANTED, said[::2], said[1::2], strict=True):
        assert whole.status_code == streamed.status_code == 200, whole.text
        (choice,) = whole.json()["choices"]
        *lines, done = (line for line in streamed.text.splitlines() if line)
        assert done == "data: [DONE]"
        chunks = [json.loads(line.removeprefix("data: "))["choices"][0] for line in lines]
        assert joined(chunks) == (without_ids(choice["message"]), choice["finish_reason"])
        assert choice["finish_reason"] == "tool_calls"
        (call,) = (one["function"] for one in choice["message"]["tool_calls"])
        assert wanted in ("required", call["name"])
        jsonschema.validate(json.loads(call["arguments"]), SCHEMAS[call["name"]])
    assert [prompt_tokens(worker)[0] for worker in decodes] == before, "decode computed a prompt"


def body_of(wanted: str, temperature: float, stream: bool) -> dict[str, object]:
    """Salted: no cached KV is shared, so that each takes the whole relay."""
    named = {"type": "function", "function": {"name": wanted}}
    return {
        "model": MODEL_NAME,
        "messages": [{"role": "user", "content": "How warm is it in Paris, and what time is it?"}],
        "tools": TOOLS,
        "tool_choice": "required" if wanted == "required" else named,
        "parallel_tool_calls": False,
        "temperature": temperature,
        "seed": 3,
        "max_tokens": 200,
        "stream": stream,
        "cache_salt": f"{wanted} {temperature} {stream}",
    }
