"""The client of bench/router.py: as cheap as may be, for it shares the cores with the router.

A connection a request. What is remembered of an answer is when each of its events was complete.
"""

import asyncio
import json
import time
from dataclasses import dataclass, field


@dataclass
class Heard:
    """One answer; nanoseconds of time.monotonic_ns."""

    seed: int
    sent: int
    events: list[int] = field(default_factory=list)


class RequestFailed(Exception):
    """It was not answered with a stream."""


class _Answer(asyncio.Protocol):
    def __init__(self, heard: Heard) -> None:
        self._heard = heard
        self._rest = b""
        self._head = b""
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def data_received(self, data: bytes) -> None:
        now = time.monotonic_ns()
        self._head = self._head or data
        self._rest += data
        *complete, self._rest = self._rest.split(b"\n\n")
        self._heard.events += [now] * len(complete)
        if complete and complete[-1].endswith(b"data: [DONE]"):
            self._end(None)

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(RequestFailed((self._head + self._rest)[:600].decode(errors="replace")))

    def _end(self, error: Exception | None) -> None:
        if self.ended.done():
            return
        if error is None:
            self.ended.set_result(None)
        else:
            self.ended.set_exception(error)


async def complete(
    port: int, model: str, prompt: str, *, seed: int, max_tokens: int, pace: int
) -> Heard:
    """Raises RequestFailed, OSError."""
    body = {"model": model, "prompt": prompt, "stream": True, "seed": seed, "top_k": pace or -1}
    content = json.dumps({**body, "max_tokens": max_tokens, "ignore_eos": True}).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    heard = Heard(seed, 0)
    transport, answer = await asyncio.get_running_loop().create_connection(
        lambda: _Answer(heard), "127.0.0.1", port
    )
    try:
        heard.sent = time.monotonic_ns()
        transport.write(head.encode() + content)
        await answer.ended
    finally:
        transport.abort()
    return heard
