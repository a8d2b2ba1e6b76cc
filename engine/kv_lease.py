"""The right to copy into or out of one sequence's blocks while it lives.

Handed by the engine to a service, which passes it to the `KVCopier`. Knows neither tensors nor
the pool.

1. The engine thread opens it with the sequence's own block table, and appends to that list as the
   sequence grows (indices below a published length never change).
2. A copier thread brackets each copy by `enter` and `exit`.
3. The engine thread closes it when the sequence lets go of its blocks. `enter` raises from then
   on; blocks with copies under way stay `in_flight` in the pool until the last `exit`, which
   calls `on_drained` once, on the thread that exits.
"""

from collections.abc import Callable, Sequence
from threading import Lock
from typing import Protocol

from engine.errors import LeaseClosed
from engine.request import BlockId, RequestId


class CopyLease(Protocol):
    """What a copier needs of a lease."""

    @property
    def block_table(self) -> Sequence[BlockId]: ...

    def enter(self) -> None: ...

    def exit(self) -> None: ...


class KVLease:
    """See the module; every method is thread-safe."""

    __slots__ = (
        "_closed",
        "_copies",
        "_lock",
        "_on_drained",
        "block_table",
        "request_id",
        "since_ns",
    )

    def __init__(
        self,
        request_id: RequestId,
        block_table: list[BlockId],
        on_drained: "Callable[[KVLease], None]",
        since_ns: int = 0,
    ) -> None:
        self.request_id = request_id
        self.since_ns = since_ns
        """When its request came."""
        self.block_table = block_table
        """Block i holds positions [i * block_size, (i + 1) * block_size). Read only, but for the
        engine thread."""
        self._on_drained = on_drained
        self._lock = Lock()
        self._copies = 0
        self._closed = False

    @property
    def closed(self) -> bool:
        return self._closed

    def enter(self) -> None:
        """A copy begins. Raises `LeaseClosed`."""
        with self._lock:
            if self._closed:
                raise LeaseClosed(f"the blocks of {self.request_id} are gone")
            self._copies += 1

    def exit(self) -> None:
        """The copy that entered is complete on the device, or failed."""
        with self._lock:
            assert self._copies > 0, "exit without enter"
            self._copies -= 1
            drained = self._closed and self._copies == 0
        if drained:
            self._on_drained(self)

    def close(self) -> bool:
        """No new copies. True if none is under way; else `on_drained` will be called."""
        with self._lock:
            assert not self._closed, "a lease closes once"
            self._closed = True
            return self._copies == 0
