"""Copies KV of sequences that gave way to host memory and back, beside the steps.

The scheduler decides (engine/preemption.py), the copier's thread copies, and what came of it goes
back to the scheduler as a command of the engine loop. `SwapCopies` is used on the engine thread.
"""

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from engine.kv_copier import KVCopier
from engine.kv_lease import CopyLease
from engine.model_runner import Runner
from engine.scheduled_batch import ScheduledBatch, SwapIn
from engine.scheduler import Scheduler
from engine.swap_space import Swap


class Swapper(Protocol):
    """Queues copies, in order; a future gives nanoseconds. Leases are entered, and left at the
    end of the copy, however it ends."""

    def swap_out(self, swap: Swap) -> Future[int]:
        """Keeps a payload for the swap, from now on until `drop`."""

    def swap_in(self, swap_in: SwapIn) -> Future[int]:
        """Out of the swap's payload."""

    def drop(self, swap: Swap) -> None:
        """No copy uses the payload, and none will."""


@dataclass(frozen=True, slots=True)
class AllLayers:
    """A `KVRange`: the first tokens of a sequence, all layers and heads of a pool."""

    num_tokens: int
    num_layers: int
    num_heads: int
    first_token: int = 0
    first_layer: int = 0
    first_head: int = 0


class KVSwapper:
    """A `Swapper` of one pool. Host memory is taken as it is needed (pinned for CUDA)."""

    def __init__(self, copier: KVCopier, num_layers: int, num_kv_heads: int) -> None:
        """`num_kv_heads`: those of the pool."""
        self._copier = copier
        self._num_layers = num_layers
        self._num_kv_heads = num_kv_heads
        self._payloads: dict[Swap, memoryview] = {}

    def swap_out(self, swap: Swap) -> Future[int]:
        return self.copy_out(swap, swap.lease)

    def swap_in(self, swap_in: SwapIn) -> Future[int]:
        return self.copy_in(swap_in, swap_in.lease)

    def copy_out(self, swap: Swap, lease: CopyLease) -> Future[int]:
        """As `swap_out`, but that another lease on the same blocks is left."""
        part = self._part(swap)
        payload = self._copier.allocate_payload(self._copier.payload_nbytes(part))
        self._payloads[swap] = payload
        return self._copier.gather(lease, part, payload, is_entered=True)

    def copy_in(self, swap_in: SwapIn, lease: CopyLease) -> Future[int]:
        """As `swap_in`, but that another lease on the same blocks is left."""
        swap = swap_in.swap
        return self._copier.scatter(
            lease, self._part(swap), self._payloads[swap], swap_in.first_token, is_entered=True
        )

    def drop(self, swap: Swap) -> None:
        del self._payloads[swap]

    def _part(self, swap: Swap) -> AllLayers:
        return AllLayers(swap.num_tokens, self._num_layers, self._num_kv_heads)


class SwapCopies:
    """See the module. `post` brings a command to the engine thread."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        swapper: Swapper | None,
        post: Callable[[Callable[[], None]], bool],
    ) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._swapper = swapper
        self._post = post

    def begin(self, batch: ScheduledBatch) -> None:
        """What the scheduler has decided; it hears of each end."""
        if self._swapper is None:
            return
        for swap in self._scheduler.preemption.space.take_over():
            self._swapper.drop(swap)
        for swap in batch.swap_outs:
            done = self._swapper.swap_out(swap)
            done.add_done_callback(partial(self._on_copied_out, swap))
        for swap_in in batch.swap_ins:
            done = self._swapper.swap_in(swap_in)
            done.add_done_callback(partial(self._on_copied_in, swap_in))

    # On the copier's thread; the engine may have ended: then nobody hears it, and nobody needs to.

    def _on_copied_out(self, swap: Swap, done: Future[int]) -> None:
        self._post(partial(self._scheduler.preemption.space.copied_out, swap, _seconds(done)))

    def _on_copied_in(self, swap_in: SwapIn, done: Future[int]) -> None:
        self._post(partial(self._join, swap_in, _seconds(done)))

    def _join(self, swap_in: SwapIn, seconds: float | None) -> None:
        """On the engine thread."""
        if self._scheduler.swapped_in(swap_in, seconds):
            self._runner.wait_for_copies(swap_in.lease)


def _seconds(done: Future[int]) -> float | None:
    """None: the copy failed."""
    return None if done.cancelled() or done.exception() is not None else done.result() / 1e9
