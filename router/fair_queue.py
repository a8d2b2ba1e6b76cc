"""Who goes next of those that wait. Pure: no IO, no clock.

* **Between tenants** of one priority: the virtual token counter of Sheng et al., "Fairness in
  Serving Large Language Models" (OSDI '24), algorithm 2. A tenant's counter grows with what it is
  served, by its weight; the lowest goes next. One that begins to wait is lifted to the lowest of
  those that wait already, or to the last that left: who asked for nothing has saved nothing up.
* **Between priorities**: the best goes first, but one turn of `RESERVE` goes to the one that was
  passed over longest. Of k priorities none waits longer than k * RESERVE turns.
* **Within a tenant**: as they came; a step of a request's own priority is worth `STEP_S` of
  waiting, so that the last is not last for ever.
* **When it is full**, the tenant with the longest line, by weight, loses the last of it.

Somebody is always next while anybody waits.
"""

import itertools
from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import Generic, TypeVar

from router.tenant import Tenant

RESERVE = 8
STEP_S = 10.0

T = TypeVar("T")


class Entry(Generic[T]):
    """One that waits."""

    __slots__ = ("cost", "item", "key", "tenant")

    def __init__(self, item: T, tenant: Tenant, cost: float, key: tuple[float, int]) -> None:
        self.item = item
        self.tenant = tenant
        self.cost = cost
        """What serving it is worth, as far as that is known before it is served."""
        self.key = key


class _Line(Generic[T]):
    """Of one tenant."""

    def __init__(self, tenant: Tenant) -> None:
        self.tenant = tenant
        self.counter = 0.0
        self.entries: list[Entry[T]] = []


class FairQueue(Generic[T]):
    """See the module."""

    def __init__(self, max_len: int) -> None:
        assert max_len > 0
        self._max_len = max_len
        self._lines: dict[str, _Line[T]] = {}
        self._len = 0
        self._numbers = itertools.count()
        self._turn = 0
        self._served: dict[int, int] = {}  # priority → turn of its last, or when it began to wait
        self._left: dict[int, float] = {}  # priority → counter of the last that ceased to wait

    def __len__(self) -> int:
        return self._len

    def __iter__(self) -> Iterator[Entry[T]]:
        """In no order that means anything."""
        return itertools.chain.from_iterable(line.entries for line in self._lines.values())

    def counter(self, name: str) -> float:
        """Of a tenant: what it was served, by its weight."""
        return self._lines[name].counter if name in self._lines else 0.0

    def put(
        self, item: T, tenant: Tenant, cost: float, now_s: float, priority: int = 0
    ) -> tuple[Entry[T], Entry[T] | None]:
        """Its entry, and the one that has to go for it, if there is no place: perhaps itself."""
        line = self._line(tenant)
        if not line.entries:
            self._lift(line)
        key = (now_s + priority * STEP_S, next(self._numbers))
        entry = Entry(item, tenant, cost, key)
        insort(line.entries, entry, key=_key)
        self._len += 1
        if self._len <= self._max_len:
            return entry, None
        longest = max(self._lines.values(), key=lambda one: len(one.entries) / one.tenant.weight)
        victim = longest.entries[-1]
        self.drop(victim)
        return entry, victim

    def head(self) -> Entry[T] | None:
        """Who is next; it stays so until somebody comes, leaves or is charged."""
        waiting = [line for line in self._lines.values() if line.entries]
        if not waiting:
            return None
        level = self._level({line.tenant.priority for line in waiting})
        ours = [line for line in waiting if line.tenant.priority == level]
        return min(ours, key=lambda line: (line.counter, line.entries[0].key[1])).entries[0]

    def take(self, entry: Entry[T]) -> None:
        """It is served: its tenant pays for what is known of it."""
        priority = entry.tenant.priority
        self.charge(entry.tenant, entry.cost)
        self.drop(entry)
        self._turn += 1
        self._served[priority] = self._turn

    def drop(self, entry: Entry[T]) -> None:
        """It does not wait any more. Nothing happens if it did not."""
        line = self._lines[entry.tenant.name]
        at = bisect_left(line.entries, entry.key, key=_key)
        if at == len(line.entries) or line.entries[at] is not entry:
            return
        del line.entries[at]
        self._len -= 1
        if not line.entries:
            self._left[line.tenant.priority] = line.counter

    def charge(self, tenant: Tenant, cost: float) -> None:
        """It was served so much, of what was taken out before; or for nothing, if it never had to
        wait."""
        self._line(tenant).counter += cost / tenant.weight

    def _line(self, tenant: Tenant) -> _Line[T]:
        line = self._lines.get(tenant.name)
        if line is None:
            line = self._lines[tenant.name] = _Line(tenant)
        line.tenant = tenant  # its weight or priority may be another since
        return line

    def _lift(self, line: _Line[T]) -> None:
        priority = line.tenant.priority
        peers = [
            one.counter
            for one in self._lines.values()
            if one.entries and one.tenant.priority == priority
        ]
        if not peers:
            self._served[priority] = self._turn
        floor = min(peers, default=self._left.get(priority, 0.0))
        line.counter = max(line.counter, floor)

    def _level(self, priorities: set[int]) -> int:
        if self._turn % RESERVE == RESERVE - 1:
            return min(priorities, key=lambda one: (self._served.get(one, 0), one))
        return min(priorities)


def _key(entry: Entry[T]) -> tuple[float, int]:
    return entry.key
