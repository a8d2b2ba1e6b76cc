"""Requests of the handoff benchmark, and what the router explains of them afterwards.

A prompt is random token ids, so nobody has it cached. Sent with `max_tokens` 1 it is cached on
prefill alone, for no ticket is minted for it. With decode's cache off it then ships whole, behind
the computation of one block: what a transfer takes that nothing overlaps.
"""

import asyncio
import json
import random
import time
from dataclasses import dataclass
from typing import Any

import aiohttp

VOCABULARY = range(100, 40_000)
TIMEOUT_S = 120.0

STAGES = ("pack", "ship", "install")

PARTS = ("pack", "ship_install", "commit", "attach")
"""Of the exposed handoff, in order; see `Relay`."""


@dataclass(frozen=True, slots=True)
class Relay:
    """One request whose KV was handed over; milliseconds.

    The exposed time is cut where one stage has ended for the last time: last chunk computed →
    last frame packed → last frame installed → COMMIT judged → token 0 told by decode. What had
    ended before the cut in front of it takes nothing.
    """

    ttft: float
    exposed: float
    transfer: float
    """First frame packed → last frame installed."""
    nbytes: int
    frames: int
    parts: dict[str, float]
    stages: dict[str, float]
    """What pack, ship and install were busy; they overlap."""


def relay(told: dict[str, Any]) -> Relay:
    """From `GET /v1/requests/{id}`. Raises ValueError if there was no handoff."""
    (prompt,) = told["prompts"]
    if prompt["exposed_handoff_ms"] is None:
        raise ValueError(f"no handoff: {json.dumps(told)[:600]}")
    attempt = prompt["attempts"][-1]
    leg = attempt["prefills"][-1]
    prefill, decode = _stages(leg), _stages(attempt["decode"])
    parts, last = {}, prefill["build"][1]
    cuts = (prefill["pack"][1], decode["install"][1], *decode["attach"])
    for name, end in zip(PARTS, cuts, strict=True):
        parts[name] = max(0.0, end - last)
        last = max(last, end)
    return Relay(
        ttft=told["ttft_ms"],
        exposed=last - prefill["build"][1],
        transfer=decode["install"][1] - prefill["pack"][0],
        nbytes=leg["kv"]["nbytes"],
        frames=leg["kv"]["frames"],
        parts=parts,
        stages={
            stage["stage"]: stage["busy_ms"]
            for stage in (*leg["stages"], *attempt["decode"]["stages"])
            if stage["stage"] in STAGES
        },
    )


def _stages(leg: dict[str, Any]) -> dict[str, tuple[float, float]]:
    """Begin and end of each, by the one clock that all processes of a host have: the router's
    estimate of the difference is taken out again, and with it its error."""
    offset: float = leg["clock_offset_ms"]
    return {
        stage["stage"]: (stage["begin_ms"] + offset, stage["end_ms"] + offset)
        for stage in leg["stages"]
    }


class Client:
    """Sends prompts to the router on `port`."""

    def __init__(self, session: aiohttp.ClientSession, port: int, model: str) -> None:
        self._session = session
        self._url = f"http://127.0.0.1:{port}"
        self._model = model

    async def compute(self, prompt: list[int]) -> None:
        """Leaves its KV in prefill's cache."""
        await self.complete(prompt, 1)

    async def relay(self, prompt: list[int]) -> Relay:
        """Has it handed over. Raises ValueError if it was not."""
        request_id = await self.complete(prompt, 2)
        async with self._session.get(f"{self._url}/v1/requests/{request_id}") as response:
            return relay(await response.json())

    async def stream(
        self, prompt: list[int], num_tokens: int, times: list[float], begun: asyncio.Event
    ) -> None:
        """Appends when each token came, by time.perf_counter; `begun` with the first."""
        body = self._body(prompt, num_tokens) | {"stream": True}
        async with self._session.post(f"{self._url}/v1/completions", json=body) as response:
            response.raise_for_status()
            async for line in response.content:
                if line.startswith(b"data:") and b"[DONE]" not in line:
                    times.append(time.perf_counter())
                    begun.set()

    async def complete(self, prompt: list[int], num_tokens: int) -> str:
        body = self._body(prompt, num_tokens)
        async with self._session.post(f"{self._url}/v1/completions", json=body) as response:
            await response.read()
            response.raise_for_status()
            return response.headers["x-baton-request-id"]

    def _body(self, prompt: list[int], num_tokens: int) -> dict[str, Any]:
        sampling = {"max_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
        return {"model": self._model, "prompt": prompt, **sampling}


class Prompts:
    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def of(self, num_tokens: int) -> list[int]:
        return self._random.choices(VOCABULARY, k=num_tokens)
