"""A load generator for OpenAI-style completion endpoints: what every serving benchmark sends.

Prompts are words that are one token each in the given tokenizer, so lengths are exact; the same
seed gives the same prompts. Closed loop: `concurrency` requests are always under way. Open loop:
Poisson arrivals at `rate`, whatever is still unanswered.
"""

import asyncio
import json
import random
import re
import time
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp


@dataclass(frozen=True)
class Load:
    """What to send."""

    base_url: str
    model: str
    num_requests: int
    prompt_len: int
    output_len: int
    concurrency: int = 1
    rate: float = 0.0
    """Requests a second, open loop; 0 is closed loop."""
    shared_prefix_len: int = 0
    """Tokens that all prompts start with, before their own `prompt_len`."""
    duration_s: float = 0.0
    """The run ends after this time, with what is under way cut; 0: when all are answered."""
    noise_interval_s: float = 0.0
    """A long prompt beside the load, every so often; 0 is none."""
    noise_prompt_len: int = 2048
    noise_output_len: int = 1
    noise_max_inflight: int = 2
    """A long prompt is skipped, and counted, while so many are unanswered."""
    timeout_s: float = 600.0


@dataclass
class Record:
    """One request as its client saw it; times in seconds of `time.perf_counter`."""

    sent: float
    token_times: list[float] = field(default_factory=list)
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    request_id: str = ""
    """As `x-baton-request-id` has it; empty: another server."""
    error: str | None = None
    is_cut: bool = False
    """The run ended before the answer did."""

    @property
    def is_ok(self) -> bool:
        return self.error is None and bool(self.token_times)

    @property
    def ttft_s(self) -> float:
        return self.token_times[0] - self.sent

    @property
    def end_to_end_s(self) -> float:
        return self.token_times[-1] - self.sent

    @property
    def tpot_s(self) -> float | None:
        """Mean time of the tokens after the first (hides stalls; see itl_s)."""
        if self.num_output_tokens < 2:
            return None
        return (self.token_times[-1] - self.token_times[0]) / (self.num_output_tokens - 1)

    @property
    def itl_s(self) -> list[float]:
        return [b - a for a, b in zip(self.token_times, self.token_times[1:], strict=False)]


@dataclass
class Run:
    """All that one run of a load saw."""

    wall_s: float
    records: list[Record]
    noise: list[Record]
    num_noise_skipped: int


class Prompts:
    """Random prompts of an exact number of tokens."""

    def __init__(self, words: list[str], seed: int, shared_prefix_len: int = 0) -> None:
        self._words = words
        self._random = random.Random(seed)
        self._prefix = self._draw(shared_prefix_len)

    def prompt(self, num_tokens: int) -> str:
        return "".join(" " + word for word in self._prefix + self._draw(num_tokens))

    def _draw(self, num_tokens: int) -> list[str]:
        return [self._random.choice(self._words) for _ in range(num_tokens)]


def one_token_words(tokenizer_json: Path) -> list[str]:
    """Lower-case words that, after a space, are one token."""
    vocabulary = json.loads(tokenizer_json.read_text(encoding="utf-8"))["model"]["vocab"]
    return sorted(token[1:] for token in vocabulary if re.fullmatch("[Ġ▁][a-z]{3,10}", token))


class _Client:
    """Sends single requests and times their events."""

    def __init__(
        self, session: aiohttp.ClientSession, load: Load, on_end: Callable[[Record], None]
    ) -> None:
        self._session = session
        self._load = load
        self._on_end = on_end

    async def send(self, prompt: str, output_len: int, into: list[Record]) -> None:
        record = Record(sent=time.perf_counter())
        into.append(record)
        try:
            await self._stream(prompt, output_len, record)
        except asyncio.CancelledError:
            record.is_cut = True
            record.num_output_tokens = len(record.token_times)
            raise
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            record.error = f"{type(error).__name__}: {error}"
        self._on_end(record)

    async def _stream(self, prompt: str, output_len: int, record: Record) -> None:
        body = {
            "model": self._load.model,
            "prompt": prompt,
            "max_tokens": output_len,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        url = f"{self._load.base_url}/v1/completions"
        async with self._session.post(url, json=body) as response:
            record.request_id = response.headers.get("x-baton-request-id", "")
            if response.status != 200:
                record.error = f"HTTP {response.status}: {(await response.text())[:300]}"
                return
            async for line in response.content:
                if line.startswith(b"data:") and not line.startswith(b"data: [DONE]"):
                    _take(json.loads(line[5:]), record)


def _take(event: dict[str, object], record: Record) -> None:
    if "error" in event:
        record.error = str(event["error"])[:300]
    for choice in typing.cast(list[dict[str, object]], event.get("choices", [])):
        if choice["text"] or not choice["finish_reason"]:  # a last chunk may only say the reason
            record.token_times.append(time.perf_counter())
    usage = event.get("usage")
    if isinstance(usage, dict):
        record.num_prompt_tokens = usage["prompt_tokens"]
        record.num_output_tokens = usage["completion_tokens"]


def _nobody(record: Record) -> None:
    """Hears that a request has ended."""


async def run_load(
    load: Load,
    words: list[str],
    seed: int,
    num_warmup: int = 2,
    on_end: Callable[[Record], None] = _nobody,
) -> Run:
    """Sends the load once. Warm-up prompts are not the load's, so no cache knows them."""
    timeout = aiohttp.ClientTimeout(total=load.timeout_s)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        client = _Client(session, load, on_end)
        warmup, cold = Prompts(words, seed ^ 0x5EED), _Client(session, load, _nobody)
        for _ in range(num_warmup):
            await cold.send(warmup.prompt(min(load.prompt_len, 64)), 4, [])
        prompts = Prompts(words, seed, load.shared_prefix_len)
        todo = [prompts.prompt(load.prompt_len) for _ in range(load.num_requests)]
        run = Run(0.0, [], [], 0)
        noise = asyncio.create_task(_noise(client, load, words, seed, run))
        started = time.perf_counter()
        try:
            async with asyncio.timeout(load.duration_s or None):
                await (_open(client, load, todo, seed, run) if load.rate else
                       _closed(client, load, todo, run))  # fmt: skip
        except TimeoutError:
            pass  # the run's own end; what was under way is marked as cut
        finally:
            run.wall_s = time.perf_counter() - started
            noise.cancel()
            await asyncio.gather(noise, return_exceptions=True)
        return run


async def _closed(client: _Client, load: Load, todo: list[str], run: Run) -> None:
    queue: Iterator[str] = iter(todo)

    async def worker() -> None:
        for prompt in queue:
            await client.send(prompt, load.output_len, run.records)

    async with asyncio.TaskGroup() as group:
        for _ in range(load.concurrency):
            group.create_task(worker())


async def _open(client: _Client, load: Load, todo: list[str], seed: int, run: Run) -> None:
    arrivals = random.Random(seed + 1)
    due = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for prompt in todo:
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            group.create_task(client.send(prompt, load.output_len, run.records))
            due += arrivals.expovariate(load.rate)


async def _noise(client: _Client, load: Load, words: list[str], seed: int, run: Run) -> None:
    """Long prompts beside the load until cancelled; those under way are then cut too."""
    if not load.noise_interval_s:
        return
    prompts = Prompts(words, seed ^ 0xBAD)
    under_way: set[asyncio.Task[None]] = set()
    async with asyncio.TaskGroup() as group:
        while True:
            await asyncio.sleep(load.noise_interval_s)
            if len(under_way) >= load.noise_max_inflight:
                run.num_noise_skipped += 1
                continue
            prompt = prompts.prompt(load.noise_prompt_len)
            task = group.create_task(client.send(prompt, load.noise_output_len, run.noise))
            under_way.add(task)
            task.add_done_callback(under_way.discard)
