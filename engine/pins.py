"""Which prefixes shall stay in the cache, by name, each until some moment. Pure: it has no clock.

A pin is a chain of block hashes. It holds whatever of them is cached now or comes to be: the pool
(engine/block_pool.py) keeps those blocks from being evicted, in the order of `hashes`, up to its
cap. Where there are more, the older pins have theirs, and of each pin its beginning.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from runtime.block_hash import BlockHash


class Pin(NamedTuple):
    hashes: tuple[BlockHash, ...]
    until_s: float


class Pins:
    """See the module."""

    def __init__(self) -> None:
        self._pins: dict[str, Pin] = {}
        self._wanted: Counter[BlockHash] = Counter()

    def __len__(self) -> int:
        return len(self._pins)

    def __contains__(self, block_hash: BlockHash) -> bool:
        return block_hash in self._wanted

    def add(self, name: str, hashes: Sequence[BlockHash], until_s: float) -> None:
        """One of that name that is there keeps its place, and is this one from now on."""
        if (old := self._pins.get(name)) is not None:
            self._wanted -= Counter(old.hashes)
        self._pins[name] = Pin(tuple(hashes), until_s)
        self._wanted.update(hashes)

    def remove(self, name: str) -> bool:
        """False: it was not there."""
        pin = self._pins.pop(name, None)
        if pin is not None:
            self._wanted -= Counter(pin.hashes)
        return pin is not None

    def expire(self, now_s: float) -> bool:
        """Those whose time is up are gone. False: none was."""
        over = [name for name, pin in self._pins.items() if pin.until_s <= now_s]
        for name in over:
            self.remove(name)
        return bool(over)

    def hashes(self) -> Iterator[BlockHash]:
        """Each once."""
        yield from dict.fromkeys(one for pin in self._pins.values() for one in pin.hashes)
