"""What the prefix cache has stored and removed, for whoever keeps an index of it elsewhere.

The engine thread writes, any thread reads; a lock is held for as long as that takes. Changes are
numbered from 0. The last `max_changes` are kept: who has heard less is told all that there is.
Blocks are told by `short_hash`, and by what became of them: who hears `Changes` in order has the
same set, whatever happened in between.
"""

import threading
from collections import deque
from itertools import islice
from typing import NamedTuple

from runtime.block_hash import BlockHash, short_hash

MAX_CHANGES = 1 << 16


class Changes(NamedTuple):
    """Those with numbers in [first, next)."""

    first: int
    next: int
    is_snapshot: bool
    """`stored` is all there is."""
    stored: list[int]
    removed: list[int]


class CacheJournal:
    """See the module."""

    def __init__(self, max_changes: int = MAX_CHANGES) -> None:
        self._lock = threading.Lock()
        self._present: set[int] = set()
        self._changes: deque[tuple[int, bool]] = deque(maxlen=max_changes)
        self._next = 0

    @property
    def next_change(self) -> int:
        """The number of the next change."""
        return self._next

    def stored(self, block_hash: BlockHash) -> None:
        self._note(short_hash(block_hash), is_stored=True)

    def removed(self, block_hash: BlockHash) -> None:
        self._note(short_hash(block_hash), is_stored=False)

    def since(self, next_change: int | None) -> Changes:
        """Those that somebody has not heard of who knows all before `next_change`; None: who knows
        nothing. Whoever cannot have heard so much hears all."""
        with self._lock:
            first = self._next - len(self._changes)
            if next_change is None or not first <= next_change <= self._next:
                return Changes(0, self._next, True, list(self._present), [])
            last = dict(islice(self._changes, next_change - first, None))
        stored = [block for block, is_stored in last.items() if is_stored]
        removed = [block for block, is_stored in last.items() if not is_stored]
        return Changes(next_change, self._next, False, stored, removed)

    def _note(self, block: int, *, is_stored: bool) -> None:
        with self._lock:
            self._changes.append((block, is_stored))
            self._next += 1
            if is_stored:
                self._present.add(block)
            else:
                self._present.discard(block)
