"""Prefixes that an operator wants to stay cached, on every worker, each for a time.

1. `pin` tells all workers; what of the prefix they have cached, or come to have, they keep, up to
   a cap of their own (engine/block_pool.py).
2. `look` hears of each state that a worker tells: one that has joined, or is another process than
   before, is told of the pins that still stand; so is, after a pause, one whose call failed.
3. `unpin` tells them all again, and later those whose call failed. What time ends, workers end by
   themselves.

A pin is a router's: several routers do not know each other's, and workers hear of all of them.
"""

import asyncio
import hashlib
import struct
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any, NamedTuple

import grpc
from pydantic import BaseModel

from protos import serving_pb2 as pb
from router.tasks import cancel_and_wait
from router.worker import Worker
from router.workers import WorkerSet
from runtime.log import get_logger

log = get_logger()

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0
"""Before a call that failed is made again; each time twice as long."""
_FOR_GOOD = (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.INVALID_ARGUMENT)
"""A process that answers so will answer so again."""

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
    failed: dict[Process, "_Failed"] = field(default_factory=dict)


class _Failed(NamedTuple):
    """A call to one process."""

    pause_s: float
    again_at_s: float


class PinBoard:
    """See the module."""

    def __init__(self, workers: WorkerSet, clock: Callable[[], float] = time.monotonic) -> None:
        self._workers = workers
        workers.on_heard = self.look
        self._clock = clock
        self._pins: dict[str, _Pin] = {}
        self._unpinned: dict[str, _Pin] = {}  # which some worker has not heard of
        self._telling: set[asyncio.Task[object]] = set()

    async def pin(
        self, token_ids: tuple[int, ...], cache_salt: str, ttl_s: float, name: str = ""
    ) -> PinView:
        """From now on for so long; one of that name that is there is replaced. Without a name it is
        called by what it pins."""
        name = name or _name_of(token_ids, cache_salt)
        pin = _Pin(name, token_ids, cache_salt, self._clock() + ttl_s)
        self._pins[name] = pin
        self._unpinned.pop(name, None)
        await asyncio.gather(*(self._tell(pin, worker) for worker in self._processes()))
        return self._view(pin)

    async def unpin(self, name: str) -> bool:
        """False: neither we nor a worker knew of it."""
        pin = self._pins.pop(name, None)
        workers = self._processes()
        told = await asyncio.gather(*(self._untell(name, worker, pin) for worker in workers))
        return pin is not None or any(told)

    def all(self) -> list[PinView]:
        """That still stand."""
        self._expire()
        return [self._view(pin) for pin in self._pins.values()]

    def look(self, worker: Worker) -> None:
        """It has told its state."""
        if not self._pins and not self._unpinned:
            return
        self._expire()
        process = _process(worker)
        for pin in self._pins.values():
            if process not in pin.kept:
                pin.kept[process] = Kept(worker=worker.name, problem="being told")
                self._spawn(self._tell(pin, worker))
            elif self._is_due(pin, process):
                self._spawn(self._tell(pin, worker))
        for pin in self._unpinned.values():
            if self._is_due(pin, process):
                self._spawn(self._untell(pin.name, worker, pin))

    async def close(self) -> None:
        await cancel_and_wait(*self._telling)

    async def _tell(self, pin: _Pin, worker: Worker) -> None:
        process = _process(worker)
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
            self._note_failed("not pinned", pin, process, error)
            kept = Kept(worker=worker.name, problem=_why(error))
        else:
            pin.failed.pop(process, None)
            kept = Kept(
                worker=worker.name,
                num_blocks=reply.num_blocks,
                num_cached=reply.num_cached,
                num_pinned=reply.num_pinned,
                max_pinned=reply.max_pinned,
            )
        pin.kept[process] = kept
        if pin.name not in self._pins:  # unpinned meanwhile
            await self._untell(pin.name, worker, pin)

    async def _untell(self, name: str, worker: Worker, pin: _Pin | None) -> bool:
        """False: it knew of none, or cannot be told now; then it hears later, if it was `pin`."""
        process = _process(worker)
        try:
            was_there = await worker.unpin(name)
        except grpc.aio.AioRpcError as error:
            if pin is not None and name not in self._pins:
                self._note_failed("not unpinned", pin, process, error)
                self._unpinned[name] = pin
            return False
        if pin is not None:
            pin.failed.pop(process, None)
        return was_there

    def _is_due(self, pin: _Pin, process: Process) -> bool:
        """A call failed, and it is time to make it again. Says so once."""
        failed = pin.failed.get(process)
        if failed is None or failed.again_at_s > self._clock():
            return False
        pin.failed[process] = failed._replace(again_at_s=inf)
        return True

    def _note_failed(
        self, what: str, pin: _Pin, process: Process, error: grpc.aio.AioRpcError
    ) -> None:
        if (before := pin.failed.get(process)) is None:
            log.warning(what, pin=pin.name, worker=process[0], why=_why(error))
        pause_s = min(_LONGEST_PAUSE_S, 2 * before.pause_s if before else _FIRST_PAUSE_S)
        is_for_good = error.code() in _FOR_GOOD
        again_at_s = inf if is_for_good else self._clock() + pause_s
        pin.failed[process] = _Failed(pause_s, again_at_s)

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
        self._unpinned = {
            name: pin for name, pin in self._unpinned.items() if pin.failed and pin.until_s > now_s
        }

    def _spawn(self, work: Coroutine[Any, Any, object]) -> None:
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
