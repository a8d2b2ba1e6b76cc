"""The staging slab: equal slots, cut once, lent and given back. Belongs to one event loop.

Two pools, one for sending and one for receiving, never one: two workers that ship to each other
must not each hold the slots the other one waits for. In a pool nobody holds more than half, so
one slow peer cannot stop the others. Waiters are served first come, first served, except that one
at its cap is passed over until it gives a slot back.
"""

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from kvfabric.frame import message_nbytes

_PAGE_NBYTES = 4096


@dataclass(slots=True, eq=False)
class Slot:
    """Room for one frame's message. Its holder is the only one to touch `message`."""

    message: memoryview
    peer: Hashable
    since_ns: int
    """When it was lent, by time.monotonic_ns."""
    owner: str = ""
    """For whom, as the ticket says; empty while no frame has told."""


@dataclass(frozen=True, slots=True, eq=False)
class _Waiter:
    peer: Hashable
    granted: asyncio.Future[Slot]


class SlotPool:
    """One budget of slots."""

    def __init__(self, messages: Sequence[memoryview]) -> None:
        self.num_slots = len(messages)
        self.payload_nbytes = len(messages[0]) - message_nbytes(0)
        """Of the largest frame."""
        self.max_per_peer = max(1, len(messages) // 2)
        self._free = list(messages)
        self.lent: set[Slot] = set()
        self._held: Counter[Hashable] = Counter()
        self._waiters: deque[_Waiter] = deque()
        self.on_shortage: Callable[[], None] = lambda: None
        """Somebody waits who would get a slot if one was free. May be set."""

    @property
    def num_used(self) -> int:
        return self.num_slots - len(self._free)

    @property
    def is_balanced(self) -> bool:
        """Every slot is free or somebody's, once."""
        free = {id(message) for message in self._free}
        lent = {id(slot.message) for slot in self.lent}
        return len(free | lent) == len(self._free) + len(self.lent) == self.num_slots

    async def acquire(self, peer: Hashable) -> Slot:
        """Waits for a slot; a cancelled wait leaves nothing behind."""
        waiter = _Waiter(peer, asyncio.get_running_loop().create_future())
        self._waiters.append(waiter)
        self._serve()
        try:
            return await waiter.granted
        except asyncio.CancelledError:
            if waiter.granted.done() and not waiter.granted.cancelled():
                self.release(waiter.granted.result())
            elif waiter in self._waiters:
                self._waiters.remove(waiter)
            raise

    def release(self, slot: Slot) -> None:
        assert slot in self.lent, "released twice"
        self.lent.remove(slot)
        self._free.append(slot.message)
        self._held[slot.peer] -= 1
        assert self._held[slot.peer] >= 0
        if not self._held[slot.peer]:
            del self._held[slot.peer]
        self._serve()

    def _serve(self) -> None:
        passed_over = []
        while self._free and self._waiters:
            waiter = self._waiters.popleft()
            if waiter.granted.cancelled():
                continue
            if self._held[waiter.peer] >= self.max_per_peer:
                passed_over.append(waiter)
                continue
            self._held[waiter.peer] += 1
            slot = Slot(self._free.pop(), waiter.peer, time.monotonic_ns())
            self.lent.add(slot)
            waiter.granted.set_result(slot)
        is_short = bool(self._waiters)
        self._waiters.extendleft(reversed(passed_over))
        if is_short:
            self.on_shortage()


def slot_stride(payload_nbytes: int) -> int:
    """Bytes of slab per slot: a whole message, rounded up to pages."""
    return -(-message_nbytes(payload_nbytes) // _PAGE_NBYTES) * _PAGE_NBYTES


def cut_slab(
    staging: memoryview, *, payload_nbytes: int, send_slots: int, recv_slots: int
) -> tuple[SlotPool, SlotPool]:
    """The send pool and the receive pool, out of one piece of memory."""
    staging = staging.cast("B")
    stride, count = slot_stride(payload_nbytes), send_slots + recv_slots
    assert min(send_slots, recv_slots) > 0
    assert len(staging) >= count * stride, f"{count} slots need {count * stride} bytes of staging"
    size = message_nbytes(payload_nbytes)
    messages = [staging[i * stride : i * stride + size] for i in range(count)]
    return SlotPool(messages[:send_slots]), SlotPool(messages[send_slots:])
