"""Prefixes that an operator wants to stay cached, on every worker, each for a time.

1. `pin` tells all workers; what of the prefix they have cached, or come to have, they keep, up to
   a cap of their own (engine/block_pool.py).
2. `look` hears of each state that a worker tells: one that has joined, or is another process than
   before, is told of the pins that still stand.
3. `unpin` tells them all again. What time ends, workers end by themselves.

A pin is a router's: several routers do not know each other's, and workers hear of all of them.
"""

import asyncio
import hashlib
import struct
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
from pydantic import BaseModel

from protos import serving_pb2 as pb
from router.tasks import cancel_and_wait
from router.worker import Worker
from router.workers import WorkerSet
from runtime.log import get_logger

log = get_logger()

Process = tuple[str, int]
"""Address and generation."""


class Kept(BaseModel):
    """Of one pin on one worker, as it answered."""

    worker: str
    problem: str | None = None
    """Why it did not take it; null: it did."""
    num_blocks: int = 0
    """Full ones of the prefix."""
    num_cached: int = 0
    """Of those, cached then."""
    num_pinned: int = 0
    """Of those, kept; fewer where the cap is reached."""
    max_pinned: int = 0
    """Its cap, in blocks, for all pins together."""


class PinView(BaseModel):
    name: str
    num_tokens: int
    remaining_s: float
    workers: list[Kept]


@dataclass
class _Pin:
    name: str
    token_ids: tuple[int, ...]
    cache_salt: str
    until_s: float
    kept: dict[Process, Kept] = field(default_factory=dict)


class PinBoard:
    """See the module."""

    def __init__(self, workers: WorkerSet, clock: Callable[[], float] = time.monotonic) -> None:
        self._workers = workers
        workers.on_heard = self.look
        self._clock = clock
        self._pins: dict[str, _Pin] = {}
        self._telling: set[asyncio.Task[None]] = set()

    async def pin(
        self, token_ids: tuple[int, ...], cache_salt: str, ttl_s: float, name: str = ""
    ) -> PinView:
        """From now on for so long; one of that name that is there is replaced. Without a name it is
        called by what it pins."""
        name = name or _name_of(token_ids, cache_salt)
        pin = _Pin(name, token_ids, cache_salt, self._clock() + ttl_s)
        self._pins[name] = pin
        await asyncio.gather(*(self._tell(pin, worker) for worker in self._processes()))
        return self._view(pin)

    async def unpin(self, name: str) -> bool:
        """False: neither we nor a worker knew of it."""
        was_there = self._pins.pop(name, None) is not None

        async def tell(worker: Worker) -> bool:
            try:
                return await worker.unpin(name)
            except grpc.aio.AioRpcError as error:
                log.warning("not unpinned", pin=name, worker=worker.name, why=_why(error))
                return False

        told = await asyncio.gather(*(tell(worker) for worker in self._processes()))
        return was_there or any(told)

    def all(self) -> list[PinView]:
        """That still stand."""
        self._expire()
        return [self._view(pin) for pin in self._pins.values()]

    def look(self, worker: Worker) -> None:
        """It has told its state."""
        if not self._pins:
            return
        self._expire()
        for pin in self._pins.values():
            if _process(worker) not in pin.kept:
                pin.kept[_process(worker)] = Kept(worker=worker.name, problem="being told")
                self._spawn(self._tell(pin, worker))

    async def close(self) -> None:
        await cancel_and_wait(*self._telling)

    async def _tell(self, pin: _Pin, worker: Worker) -> None:
        remaining_ms = max(1, round((pin.until_s - self._clock()) * 1000))
        request = pb.PinRequest(
            name=pin.name,
            token_ids=pin.token_ids,
            cache_salt=pin.cache_salt,
            ttl_ms=remaining_ms,
        )
        try:
            reply = await worker.pin(request)
        except grpc.aio.AioRpcError as error:
            kept = Kept(worker=worker.name, problem=_why(error))
            log.warning("not pinned", pin=pin.name, worker=worker.name, why=kept.problem)
        else:
            kept = Kept(
                worker=worker.name,
                num_blocks=reply.num_blocks,
                num_cached=reply.num_cached,
                num_pinned=reply.num_pinned,
                max_pinned=reply.max_pinned,
            )
        pin.kept[_process(worker)] = kept
        if pin.name not in self._pins:  # unpinned meanwhile
            await self.unpin(pin.name)

    def _processes(self) -> list[Worker]:
        """Those that were heard of, each once."""
        heard = (worker for worker in self._workers.everyone if worker.num_refreshes)
        return list({worker.address: worker for worker in heard}.values())

    def _view(self, pin: _Pin) -> PinView:
        present = {_process(worker) for worker in self._processes()}
        return PinView(
            name=pin.name,
            num_tokens=len(pin.token_ids),
            remaining_s=round(max(0.0, pin.until_s - self._clock()), 3),
            workers=[kept for process, kept in pin.kept.items() if process in present],
        )

    def _expire(self) -> None:
        now_s = self._clock()
        self._pins = {name: pin for name, pin in self._pins.items() if pin.until_s > now_s}

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._telling.add(task)
        task.add_done_callback(self._telling.discard)


def _process(worker: Worker) -> Process:
    return worker.address, worker.status.generation


def _name_of(token_ids: Sequence[int], cache_salt: str) -> str:
    digest = hashlib.sha256(struct.pack(f"<{len(token_ids)}I", *token_ids))
    digest.update(cache_salt.encode())
    return f"pin-{digest.hexdigest()[:12]}"


def _why(error: grpc.aio.AioRpcError) -> str:
    return f"{error.code().name.lower()}: {error.details() or ''}".rstrip(": ")
