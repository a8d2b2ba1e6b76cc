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
from engine.model_runner import Runner
from engine.scheduled_batch import ScheduledBatch, SwapIn
from engine.scheduler import Scheduler
from engine.swap_space import Swap


class Swapper(Protocol):
    """Queues copies, in order; a future gives nanoseconds. Leases are entered, and left at the
    end of the copy, however it ends."""

    def swap_out(self, swap: Swap) -> Future[int]:
        """Fills `swap.payload`."""

    def swap_in(self, swap_in: SwapIn) -> Future[int]:
        """Out of `swap_in.swap.payload`."""


@dataclass(frozen=True, slots=True)
class _AllLayers:
    """A `KVRange`: the first tokens of a sequence, all layers and heads."""

    num_tokens: int
    num_layers: int
    num_heads: int
    first_token: int = 0
    first_layer: int = 0
    first_head: int = 0


class KVSwapper:
    """A `Swapper` of one pool. Host memory is taken as it is needed (pinned for CUDA)."""

    def __init__(self, copier: KVCopier, num_layers: int, num_kv_heads: int) -> None:
        self._copier = copier
        self._num_layers = num_layers
        self._num_kv_heads = num_kv_heads

    def swap_out(self, swap: Swap) -> Future[int]:
        swap.payload = self._copier.allocate_payload(swap.nbytes)
        return self._copier.gather(swap.lease, self._part(swap), swap.payload, is_entered=True)

    def swap_in(self, swap_in: SwapIn) -> Future[int]:
        swap = swap_in.swap
        assert swap.payload is not None, swap.request_id
        return self._copier.scatter(
            swap_in.lease, self._part(swap), swap.payload, swap_in.first_token, is_entered=True
        )

    def _part(self, swap: Swap) -> _AllLayers:
        return _AllLayers(swap.num_tokens, self._num_layers, self._num_kv_heads)


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
