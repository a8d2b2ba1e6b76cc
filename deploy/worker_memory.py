"""Where a worker's memory goes, for its log at start."""

import os
from pathlib import Path

from engine.engine import Engine

_STATM = Path("/proc/self/statm")
_PAGE_NBYTES = os.sysconf("SC_PAGE_SIZE")


def memory_mb(engine: Engine, staging_nbytes: int) -> dict[str, str]:
    """Megabytes by purpose, of this process (rank 0, if there are more); and resident in all, which
    has the interpreter and its libraries too. Swap space is taken as it is needed."""
    parts = {
        "weights": engine.weights_nbytes,
        "kv_pool": engine.kv_pool_nbytes[0],
        "staging": staging_nbytes,
        "swap_up_to": engine.config.swap_memory,
    }
    if (resident := resident_nbytes()) is not None:
        parts["resident"] = resident
    return {name: f"{nbytes / 1e6:.0f}MB" for name, nbytes in parts.items()}


def resident_nbytes() -> int | None:
    """None where the system does not tell."""
    if not _STATM.exists():
        return None
    return int(_STATM.read_text().split()[1]) * _PAGE_NBYTES
