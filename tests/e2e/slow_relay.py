"""A cluster with a middle to break things in: a tiny model in float32, so that answers compare
exactly, whose prompts take hundreds of steps and whose answers take dozens.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from tests.e2e.cluster import Cluster, WorkerProcess
from tests.e2e.tokens import TokenClient, token_client

NUM_PROMPT = 1200
NUM_OUTPUTS = 120
INACTIVITY_S = 2.5
POOL_BLOCKS = 200
ADMIN_TOKEN = "relay"
CHUNK = 4
"""Tokens of a prefill step: so few that a prompt takes hundreds of steps."""


def of_role(cluster: Cluster, role: str) -> list[WorkerProcess]:
    return [worker for worker in cluster.workers if worker.role == role]


def is_prefilling(worker: WorkerProcess) -> bool:
    return worker.is_running and worker.status().num_running > 0


def is_receiving(worker: WorkerProcess) -> bool:
    """Its blocks are claimed, so frames have come; and it waits for more."""
    status = worker.status()
    return status.num_awaiting_kv > 0 and status.blocks.held > 0


def is_decoding(worker: WorkerProcess) -> bool:
    return worker.status().num_running > 0


async def first(
    workers: list[WorkerProcess],
    condition: Callable[[WorkerProcess], bool],
    within_s: float = 20.0,
) -> WorkerProcess:
    """The worker that first meets the condition."""
    async with asyncio.timeout(within_s):
        while True:
            for worker in workers:
                if await asyncio.to_thread(condition, worker):
                    return worker


def prompt_of(seed: int, length: int = NUM_PROMPT) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(17, 49152) for _ in range(length)]


async def undisturbed(cluster: Cluster, prompt: list[int], num_outputs: int) -> list[int]:
    """The answer of one engine."""
    async with token_client([], of_role(cluster, "decode"), mode="colocated") as client:
        return await client.generate(prompt, num_outputs, cache_salt="undisturbed")


@asynccontextmanager
async def relay_client(cluster: Cluster) -> AsyncIterator[TokenClient]:
    async with token_client(
        of_role(cluster, "prefill"), of_role(cluster, "decode"), inactivity_s=INACTIVITY_S
    ) as client:
        yield client
