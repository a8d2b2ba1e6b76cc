"""The sum of a pool's blocks, as engine/block_pool.py counts them."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BlockLedger:
    """Where the blocks of a pool are."""

    free: int
    """Neither used nor spoken for."""
    cached: int
    """Nobody's, but with KV that a prompt may find again; as good as free."""
    held: int
    """Referenced by a sequence."""
    in_flight: int
    """Owned by nobody, but a copy is under way."""
    promised: int
    """Taken by no id yet, but spoken for."""
    pinned: int = 0
    """Nobody's, as the cached ones, but not to be had."""

    @property
    def unused(self) -> int:
        """Nobody's: free, cached or pinned."""
        return self.free + self.cached + self.pinned
