"""Where each sequence of a scheduler is: waiting in its order, running or awaiting KV by age.

Pure bookkeeping. `Sequence.status` says which queue a sequence is in, and only `join` and `leave`
write it, so the two cannot disagree.
"""

from bisect import insort
from collections.abc import Callable, Iterator
from itertools import chain

from engine.prefill_order import PrefillOrder
from engine.sequence import Sequence, Status


class Queues:
    """See the module."""

    def __init__(self, order: PrefillOrder) -> None:
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.awaiting_kv: list[Sequence] = []
        self.swapping_in: list[Sequence] = []
        self._queues: dict[Status, tuple[list[Sequence], Callable[[Sequence], object]]] = {
            Status.WAITING: (self.waiting, order.key),
            Status.RUNNING: (self.running, _arrival),
            Status.AWAITING_KV: (self.awaiting_kv, _arrival),
            Status.SWAPPING_IN: (self.swapping_in, _arrival),
        }

    def join(self, seq: Sequence, status: Status) -> None:
        """It is in no queue, or new."""
        seq.status = status
        if status in self._queues:
            queue, key = self._queues[status]
            insort(queue, seq, key=key)  # type: ignore[type-var]

    def leave(self, seq: Sequence) -> None:
        """Its queue, if it is in one; it joins another, or has ended."""
        if seq.status in self._queues:
            self._queues[seq.status][0].remove(seq)

    def move(self, seq: Sequence, status: Status) -> None:
        self.leave(seq)
        self.join(seq, status)

    @property
    def num_slots_taken(self) -> int:
        held = chain(self.running, self.awaiting_kv, self.swapping_in)
        return sum(seq.num_slots for seq in held)

    @property
    def num_growing(self) -> int:
        """That will need another block sooner or later."""
        return len(self.swapping_in) + sum(not seq.is_prefill_leg for seq in self.running)

    def to_compute(self) -> Iterator[Sequence]:
        """All that have a prompt or a tail to compute, or may come to have one."""
        yield from (seq for seq in self.running if seq.num_uncomputed_tokens > 1)
        yield from self.waiting

    def youngest(self, than: Sequence) -> Sequence | None:
        """The youngest of the running and the reserved that may give way to `than`: it is younger
        itself, and nobody copies out of its blocks or into them. (What is copied back runs soon.)
        """
        running = (seq for seq in reversed(self.running) if not seq.is_prefill_leg)
        tops = [seq for seq in (next(running, None), *self.awaiting_kv[-1:]) if seq is not None]
        youngest = max(tops, key=_arrival, default=than)
        return youngest if youngest.arrival > than.arrival else None


def _arrival(seq: Sequence) -> int:
    return seq.arrival
