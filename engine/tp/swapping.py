"""Swapping on several ranks: each copies its own heads, and a swap is over when all have.

`MirroredSwaps` is rank 0's; it keeps the blocks from others until the last rank is done, and the
slowest one says how long it took. `RankSwaps` is another rank's, which does as it is told: it knows
a swap by a number, and keeps its payload until rank 0 drops it. A copy that fails on one rank has
failed on all: the sequence is computed again.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import count
from threading import Lock

from engine.kv_copier import KVCopier
from engine.kv_lease import KVLease
from engine.kv_swapper import AllLayers, KVSwapper
from engine.request import BlockId, RequestId
from engine.scheduled_batch import SwapIn
from engine.swap_space import Swap
from engine.tp.channel import Kind
from engine.tp.messages import SwapOrder, Swapped
from engine.tp.ranks import ConnectedRanks


class MirroredSwaps:
    """A `Swapper` of all ranks."""

    def __init__(self, own: KVSwapper, ranks: ConnectedRanks, block_size: int) -> None:
        self._own = own
        self._ranks = ranks
        self._block_size = block_size
        self._serials = count()
        self._serial_of: dict[Swap, int] = {}

    def swap_out(self, swap: Swap) -> Future[int]:
        serial = self._serial_of[swap] = next(self._serials)
        order = self._order(serial, 0, swap, swap.lease)
        all_done = AllDone(swap.lease, self._ranks.shard.size)
        self._ranks.swap(Kind.SWAP_OUT, order, all_done.copied)
        self._own.copy_out(swap, all_done).add_done_callback(all_done.copied)
        return all_done.future

    def swap_in(self, swap_in: SwapIn) -> Future[int]:
        swap = swap_in.swap
        order = self._order(self._serial_of[swap], swap_in.first_token, swap, swap_in.lease)
        all_done = AllDone(swap_in.lease, self._ranks.shard.size)
        self._ranks.swap(Kind.SWAP_IN, order, all_done.copied)
        self._own.copy_in(swap_in, all_done).add_done_callback(all_done.copied)
        return all_done.future

    def drop(self, swap: Swap) -> None:
        self._ranks.drop_swap(self._serial_of.pop(swap))
        self._own.drop(swap)

    def _order(self, serial: int, first_token: int, swap: Swap, lease: KVLease) -> SwapOrder:
        num_blocks = -(-swap.num_tokens // self._block_size)
        return SwapOrder(serial, first_token, swap.num_tokens, lease.block_table[:num_blocks])


class AllDone:
    """The copies of all ranks under one lease, which was entered once: it is left after the last.
    As a `CopyLease` it is for the own one."""

    def __init__(self, lease: KVLease, num_copies: int) -> None:
        self.future: Future[int] = Future()
        self.block_table: Sequence[BlockId] = lease.block_table
        self._lease = lease
        self._lock = Lock()
        self._left = num_copies
        self._ns: list[int] = []
        self._error: BaseException | None = None

    def enter(self) -> None:
        raise AssertionError("it was entered for all")

    def exit(self) -> None:
        """It is left by the last `copied`."""

    def copied(self, done: Future[int]) -> None:
        """One of them is over. Any thread."""
        error = done.exception()
        with self._lock:
            self._left -= 1
            if error is None:
                self._ns.append(done.result())
            else:
                self._error = error
            is_last = self._left == 0
        if not is_last:
            return
        self._lease.exit()
        if self._error is None:
            self.future.set_result(max(self._ns))
        else:
            self.future.set_exception(self._error)


class RankSwaps:
    """See the module. `tell` sends to rank 0, on any thread."""

    def __init__(
        self, copier: KVCopier, num_layers: int, num_kv_heads: int, tell: Callable[[Swapped], None]
    ) -> None:
        self._copier = copier
        self._num_layers = num_layers
        self._num_kv_heads = num_kv_heads
        self._tell = tell
        self._payloads: dict[int, memoryview] = {}

    def swap_out(self, order: SwapOrder) -> None:
        part = self._part(order)
        payload = self._copier.allocate_payload(self._copier.payload_nbytes(part))
        self._payloads[order.serial] = payload
        done = self._copier.gather(_lease(order), part, payload)
        done.add_done_callback(partial(self._on_done, order.serial))

    def swap_in(self, order: SwapOrder) -> None:
        payload = self._payloads[order.serial]
        done = self._copier.scatter(_lease(order), self._part(order), payload, order.first_token)
        done.add_done_callback(partial(self._on_done, order.serial))

    def drop(self, serial: int) -> None:
        del self._payloads[serial]

    def _part(self, order: SwapOrder) -> AllLayers:
        return AllLayers(order.num_tokens, self._num_layers, self._num_kv_heads)

    def _on_done(self, serial: int, done: Future[int]) -> None:
        """On the copier's thread."""
        has_failed = done.cancelled() or done.exception() is not None
        self._tell(Swapped(serial, -1 if has_failed else done.result()))


def _lease(order: SwapOrder) -> KVLease:
    """Rank 0 holds the blocks until it hears that the copy is over: nothing drains here."""
    blocks = [BlockId(block_id) for block_id in order.block_ids]
    return KVLease(RequestId("a swap"), blocks, lambda _: None)
