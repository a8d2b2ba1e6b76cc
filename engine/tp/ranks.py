"""The other ranks of a worker, as rank 0 sees them.

Rank 0 is a whole engine, but for its part of the weights and of the KV. The others have a part
each, and no decisions: the runner tells them of each piece of tensor work before it does its own.
Life of a `ConnectedRanks`:

1. Somebody has started the ranks, and hands over the channels to them. From now on a thread for
   each listens: a rank that ends, or says why it fails, is lost, and `on_lost` hears of the first.
2. `join`, when rank 0 has loaded its own part: waits until each has, and all meet.
3. `forward`, `prompt_logits`, `copy_blocks`, `swap`, on the engine thread.
4. `close` tells them to end, and waits until they are gone.

A step in which a rank is lost fails with an error of the collectives, or of the channel; `explain`
makes of it what the rank said.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Protocol

import torch

from engine.batch import PackedBatch
from engine.config import ModelError
from engine.errors import EngineError
from engine.scheduled_batch import BlockCopy
from engine.tp.channel import Kind, StepChannel
from engine.tp.collectives import JOIN_TIMEOUT_S, Alone, Collectives, TorchCollectives
from engine.tp.messages import Loaded, SwapOrder, Swapped, pack_batch, pack_ids, pack_rows
from engine.tp.shard import Shard

logger = logging.getLogger(__name__)

END_TIMEOUT_S = 2.0
"""For ranks that were told to end."""
_REASON_TIMEOUT_S = 1.0
"""For a rank's last words, once something has failed."""


_Swapping = tuple[int, Callable[[Future[int]], None]]
"""A swap's number, and who hears of it."""


class RankLost(EngineError):
    """A rank has ended, or failed; the engine cannot go on without it."""


class Ranks(Protocol):
    """What a runner tells the other ranks, each before it does the same itself."""

    @property
    def are_there(self) -> bool:
        """There are any."""

    def forward(self, batch: PackedBatch) -> None: ...

    def prompt_logits(self, rows: slice) -> None:
        """Of the last forward, for these rows of `BatchInput.prompt_indices`."""

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None: ...

    def wait(self, device: torch.device) -> None:
        """Until a forward that nobody reads is done, on `device` and so on all ranks."""

    def check(self) -> None:
        """Raises RankLost if one was lost by now: what a step gave may be nonsense then."""

    def explain(self, error: Exception) -> Exception:
        """What to make of an exception of a step."""


class NoRanks:
    """Of an engine that is alone."""

    are_there = False

    def __init__(self) -> None:
        self.collectives: Collectives = Alone()

    def join(self, digest: bytes, num_blocks: int) -> list[int]:
        return []

    def watch(self, on_lost: Callable[["RankLost"], None]) -> None:
        """Nobody can be lost."""

    def close(self) -> None:
        """Nobody has to end."""

    def forward(self, batch: PackedBatch) -> None:
        """Nobody hears it."""

    def prompt_logits(self, rows: slice) -> None:
        """Nobody hears it."""

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """Nobody hears it."""

    def wait(self, device: torch.device) -> None:
        """Nobody depends on it."""

    def check(self) -> None:
        """Nobody can be lost."""

    def explain(self, error: Exception) -> Exception:
        return error


class ConnectedRanks:
    """See the module."""

    are_there = True

    def __init__(
        self, channels: Sequence[StepChannel], device: torch.device, rendezvous: Path
    ) -> None:
        """`channels`: to ranks 1, 2, …; they are this object's from now on. `device` is rank 0's;
        for `rendezvous` see TorchCollectives."""
        self.shard = Shard(0, len(channels) + 1)
        self.collectives = TorchCollectives(self.shard, device, rendezvous)
        self._channels = channels
        self._swapping: list[deque[_Swapping]] = [deque() for _ in channels]
        """Of each rank: what it was told to copy, in order, as it does it."""
        self._loaded: list[Future[Loaded]] = [Future() for _ in channels]
        self._lock = threading.Lock()
        self._lost: RankLost | None = None
        self._is_lost = threading.Event()
        self._is_closing = False
        self._is_in_step = False
        """All ranks have met, and no step has failed: they will hear what they are told."""
        self._on_lost: Callable[[RankLost], None] = _nobody
        self._listeners = [
            threading.Thread(target=self._listen, args=(rank,), name=f"rank-{rank}", daemon=True)
            for rank in range(1, self.shard.size)
        ]
        for listener in self._listeners:
            listener.start()

    def join(self, digest: bytes, num_blocks: int) -> list[int]:
        """Blocks until all ranks have loaded and met. Bytes of the KV pool of each. Raises
        RankLost, or ModelError if one has loaded something else."""
        try:
            loaded = [future.result(JOIN_TIMEOUT_S) for future in self._loaded]
            if any((rank.digest, rank.num_blocks) != (digest, num_blocks) for rank in loaded):
                raise ModelError("the model's files changed while the ranks were loading them")
            self.collectives.join()
            self._is_in_step = True
        except (RuntimeError, TimeoutError) as error:
            raise self.explain(error) from error
        return [rank.pool_nbytes for rank in loaded]

    def watch(self, on_lost: Callable[[RankLost], None]) -> None:
        """`on_lost` is called once, on a thread of its own, if a rank is lost before `close`."""
        with self._lock:
            self._on_lost = on_lost
            lost = self._lost
        if lost is not None:
            on_lost(lost)

    def forward(self, batch: PackedBatch) -> None:
        self._tell(Kind.FORWARD, *pack_batch(batch))

    def prompt_logits(self, rows: slice) -> None:
        self._tell(Kind.PROMPT_LOGITS, pack_rows(rows))

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        self._tell(Kind.COPY_BLOCKS, pack_ids(copies))

    def swap(self, kind: Kind, order: SwapOrder, on_done: Callable[[Future[int]], None]) -> None:
        """`on_done` hears of each rank, on a thread of its own, with nanoseconds."""
        with self._lock:
            for swapping in self._swapping:
                swapping.append((order.serial, on_done))
        self._tell(kind, order.pack())

    def drop_swap(self, serial: int) -> None:
        self._tell(Kind.SWAP_DROP, pack_ids([serial]))

    def wait(self, device: torch.device) -> None:
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()  # sync point

    def check(self) -> None:
        if self._lost is not None:
            raise self._lost

    def explain(self, error: Exception) -> Exception:
        self._is_in_step = False
        if isinstance(error, RankLost):
            return error
        self._is_lost.wait(_REASON_TIMEOUT_S)
        return error if self._lost is None else self._lost

    def close(self) -> None:
        """Idempotent. Ranks that do not end in time, or that are out of step, find their channel
        shut."""
        with self._lock:
            self._is_closing = True
        if self._is_in_step and not self._is_lost.is_set():
            self._end()
        self.collectives.close()
        for listener, channel in zip(self._listeners, self._channels, strict=True):
            channel.shut()
            listener.join()
            channel.close()

    def _end(self) -> None:
        for channel, listener in zip(self._channels, self._listeners, strict=True):
            try:
                channel.send(Kind.CLOSE)
            except OSError:
                logger.debug("%s is gone already", listener.name)
        deadline = time.monotonic() + END_TIMEOUT_S
        for listener in self._listeners:
            listener.join(max(0.0, deadline - time.monotonic()))
        self._is_in_step = False

    def _tell(self, kind: Kind, *parts: bytes | memoryview) -> None:
        try:
            for channel in self._channels:
                channel.send(kind, *parts)
        except OSError as error:
            raise self.explain(error) from error

    # ── a rank's listener ──

    def _listen(self, rank: int) -> None:
        channel, reason = self._channels[rank - 1], "ended"
        while (message := channel.receive()) is not None:
            if message.kind is Kind.LOADED:
                self._loaded[rank - 1].set_result(Loaded.read(message.payload))
            elif message.kind is Kind.SWAPPED:
                self._on_swapped(rank, Swapped.read(message.payload))
            elif message.kind is Kind.FAILED:
                reason = f"failed: {message.payload.decode()}"
            else:
                raise AssertionError(f"a rank does not say {message.kind!r}")
        self._lose(rank, RankLost(f"rank {rank} {reason}"))

    def _on_swapped(self, rank: int, swapped: Swapped) -> None:
        serial, on_done = self._swapping[rank - 1].popleft()
        assert serial == swapped.serial, "copies are in order"
        done: Future[int] = Future()
        if swapped.ns < 0:
            done.set_exception(RankLost(f"rank {rank} could not copy"))
        else:
            done.set_result(swapped.ns)
        on_done(done)

    def _lose(self, rank: int, lost: RankLost) -> None:
        with self._lock:
            is_first = self._lost is None and not self._is_closing
            self._lost = self._lost or lost
            on_lost = self._on_lost
        self._is_lost.set()
        if is_first:
            logger.error("%s", lost)
            self.collectives.abort()
            on_lost(lost)
        if not self._loaded[rank - 1].done():
            self._loaded[rank - 1].set_exception(lost)


def _nobody(lost: RankLost) -> None:
    """Nobody wants to know yet; `join` and `explain` tell."""


ALONE = NoRanks()
