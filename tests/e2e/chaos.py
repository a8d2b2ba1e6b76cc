"""Steady load on a cluster, and things that happen to its workers meanwhile, one every few seconds.

A client's request ends in one of three ways: answered as it was when nothing happened; refused
before its first token, 429 or 503 with Retry-After; or wrong, which is noted with what came.
"""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import httpx
import pytest

from deploy.admin import Admin, Refused
from tests.e2e.answers import KINDS, Answer, ask
from tests.e2e.cluster import Cluster, WorkerProcess

PROMPTS = tuple(f"Tell me of {what}, and take your time." for what in ("rivers", "the sea"))
LOGPROB_TOLERANCE = 1e-4
NUM_TOKENS = 120

Case = tuple[str, str]
"""Kind and prompt."""
CASES: tuple[Case, ...] = tuple((kind, prompt) for kind in KINDS for prompt in PROMPTS)


@dataclass
class Outcomes:
    answered: Counter[str] = field(default_factory=Counter)
    refused: Counter[int] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    slowest_s: float = 0.0

    def judge(self, kind: str, answer: Answer, expected: Answer) -> None:
        if answer.status in (429, 503) and "retry-after" in answer.headers:
            self.refused[answer.status] += 1
        elif answer.told() != expected.told():
            self.wrong.append(f"{kind}: {answer.told()} instead of {expected.told()}")
        elif answer.logprobs() != pytest.approx(expected.logprobs(), abs=LOGPROB_TOLERANCE):
            self.wrong.append(f"{kind}: other logprobs")
        else:
            self.answered[kind] += 1


async def undisturbed(client: httpx.AsyncClient, num_tokens: int) -> dict[Case, Answer]:
    """All at once: in float32 an answer is the same whatever runs beside it."""
    answers = await asyncio.gather(
        *(ask(client, KINDS[kind], prompt, num_tokens, Answer()) for kind, prompt in CASES)
    )
    return dict(zip(CASES, answers, strict=True))


async def storm(
    cluster: Cluster, admin: Admin, chaos: "Chaos", *, seconds: float, num_clients: int
) -> Outcomes:
    """Steady load of requests of every kind while `chaos` happens to the workers."""
    outcomes = Outcomes()
    async with httpx.AsyncClient(base_url=cluster.routers[0].url, timeout=120) as client:
        expected = await undisturbed(client, NUM_TOKENS)
        assert all(answer.status == 200 for answer in expected.values())
        end = time.monotonic() + seconds
        async with asyncio.TaskGroup() as group:
            group.create_task(chaos.until(end))
            for i in range(num_clients):
                load = ask_until(end, random.Random(i), client, expected, NUM_TOKENS, outcomes)
                group.create_task(load)
    return outcomes


async def ask_until(
    end: float,
    draw: random.Random,
    client: httpx.AsyncClient,
    expected: dict[Case, Answer],
    num_tokens: int,
    outcomes: Outcomes,
) -> None:
    while (began := time.monotonic()) < end:
        kind, prompt = case = draw.choice(CASES)
        answer = Answer()
        try:
            await ask(client, KINDS[kind], prompt, num_tokens, answer)
        except (httpx.HTTPError, ValueError) as error:
            outcomes.wrong.append(f"{kind}: broken off by {error!r} after {answer.num_events}")
        else:
            outcomes.judge(kind, answer, expected[case])
            if answer.status != 200:  # as a client does that is told to come back
                await asyncio.sleep(float(answer.headers.get("retry-after", 0)))
        outcomes.slowest_s = max(outcomes.slowest_s, time.monotonic() - began)


class Chaos:
    """What happens to workers. Each comes to an end with the worker as it was before."""

    def __init__(
        self,
        cluster: Cluster,
        admin: Admin,
        draw: random.Random,
        *,
        joins: bool = True,
        pause_s: tuple[float, float] = (1.0, 4.0),
        freeze_s: float = 6.0,
    ) -> None:
        """`pause_s`: between two events, at least and at most. `freeze_s`: at most."""
        self.happened: Counter[str] = Counter()
        self._pause_s = pause_s
        self._freeze_s = freeze_s
        self._cluster = cluster
        self._admin = admin
        self._draw = draw
        self._joins = joins
        self._busy: set[str] = set()

    async def until(self, end: float) -> None:
        """Something every few seconds, also while something else is going on elsewhere."""
        async with asyncio.TaskGroup() as group:
            while time.monotonic() < end:
                group.create_task(self._something())
                await asyncio.sleep(self._draw.uniform(*self._pause_s))

    async def _something(self) -> None:
        free = [one for one in self._cluster.workers if one.name not in self._busy]
        # One stays as it is, or nobody would be there to answer.
        if len(free) < 2:
            return
        worker = self._draw.choice(free)
        events: Sequence[Callable[[WorkerProcess], Awaitable[None]]] = (
            self._kill, self._kill, self._freeze, self._end, self._drain, self._flip,
        )  # fmt: skip
        event = self._draw.choice(events)
        if self._joins and "join" not in self._busy and self._draw.random() < 0.12:
            self._busy.add("join")
            await self._join()
            self._busy.discard("join")
            return
        self._busy.add(worker.name)
        self.happened[event.__name__.strip("_")] += 1
        await event(worker)
        self._busy.discard(worker.name)

    async def _kill(self, worker: WorkerProcess) -> None:
        worker.kill()
        await self._start_again(worker)

    async def _freeze(self, worker: WorkerProcess) -> None:
        worker.freeze()
        try:
            await asyncio.sleep(self._draw.uniform(0.2, self._freeze_s))
        finally:
            worker.thaw()
        await asyncio.to_thread(worker.wait_ready)

    async def _end(self, worker: WorkerProcess) -> None:
        """SIGTERM: what does not end within its grace goes elsewhere."""
        worker.ask_to_end()
        await asyncio.to_thread(worker.wait_end)
        await self._start_again(worker)

    async def _drain(self, worker: WorkerProcess) -> None:
        await self._assign(worker, [])
        await asyncio.sleep(self._draw.uniform(0.5, 3.0))
        await self._assign(worker, [worker.role])

    async def _flip(self, worker: WorkerProcess) -> None:
        other = "prefill" if worker.role == "decode" else "decode"
        await self._assign(worker, self._draw.choice([[other], ["prefill", "decode"]]))
        await asyncio.sleep(self._draw.uniform(1.0, 5.0))
        await self._assign(worker, [worker.role])

    async def _join(self) -> None:
        self.happened["join"] += 1
        worker = self._cluster.worker(self._draw.choice(["prefill", "decode"]))
        self._busy.add(worker.name)
        await asyncio.to_thread(worker.wait_ready)
        await asyncio.to_thread(self._admin.add, worker.grpc_address)
        await asyncio.sleep(self._draw.uniform(3.0, 8.0))
        await asyncio.to_thread(self._admin.remove, worker.grpc_address)
        worker.ask_to_end()
        await asyncio.to_thread(worker.wait_end)
        self._cluster.workers.remove(worker)

    async def _assign(self, worker: WorkerProcess, roles: list[str]) -> None:
        grace_s = self._draw.choice([0.0, 0.3, 2.0])
        try:
            await asyncio.to_thread(self._admin.assign, worker.grpc_address, roles, grace_s)
        except Refused:
            assert worker.is_running, f"{worker.name} died:\n{worker.tail()}"
            raise

    async def _start_again(self, worker: WorkerProcess) -> None:
        worker.start_again()
        await asyncio.to_thread(worker.wait_ready)
