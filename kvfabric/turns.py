"""Who of several transfers goes next: each in turn, with a frame's worth of bytes. Pure.

Turns are of bytes and not of frames (deficit round robin, Shreedhar and Varghese 1995, without the
debts): a short handoff that leaves by groups of layers, in frames far from full, has them all in
one turn. What carries no bytes waits for no turn.
"""

from collections import deque
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class Turns(Generic[T]):
    """See the module."""

    def __init__(self, quantum: int) -> None:
        """Bytes of a turn; more only for what is more at once."""
        self._quantum = quantum
        self._ring: deque[T] = deque()  # whose turn it is, first
        self._taken = 0  # bytes of this turn

    def __iter__(self) -> Iterator[T]:
        return iter(self._ring)

    def add(self, one: T) -> None:
        """Its first turn comes after everyone's."""
        self._ring.append(one)

    def remove(self, one: T) -> None:
        if one is self._ring[0]:
            self._taken = 0
        self._ring.remove(one)

    def took(self, one: T, nbytes: int) -> None:
        """It went, without asking: nobody else was ready."""
        if one is not self._ring[0]:
            self._ring.rotate(-self._ring.index(one))
            self._taken = 0
        self._taken = self._taken + nbytes if self._taken + nbytes <= self._quantum else nbytes

    def next(self, nbytes: Callable[[T], int | None]) -> T | None:
        """Whose turn it is; `nbytes` of what each would send now, None: nothing is ready."""
        for one in self._ring:
            if nbytes(one) == 0:
                return one
        if not self._ring:
            return None
        for _ in range(len(self._ring) + 1):  # the first may have had its turn, and get another
            one = self._ring[0]
            size = nbytes(one)
            if size is not None and (not self._taken or self._taken + size <= self._quantum):
                self._taken += size
                return one
            self._ring.rotate(-1)
            self._taken = 0
        return None
