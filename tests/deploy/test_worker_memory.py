"""What a worker's log says of its memory."""

import mmap
from types import SimpleNamespace
from typing import Any

import numpy as np

from deploy.worker_memory import memory_mb, resident_nbytes


def test_each_part_has_its_megabytes() -> None:
    engine: Any = SimpleNamespace(
        weights_nbytes=269_000_000,
        kv_pool_nbytes=(1_000_000_000, 5),
        config=SimpleNamespace(swap_memory=512_000_000),
    )
    told = memory_mb(engine, staging_nbytes=67_000_000)
    assert told.pop("resident").endswith("MB")
    assert told == {
        "weights": "269MB",
        "kv_pool": "1000MB",
        "staging": "67MB",
        "swap_up_to": "512MB",
    }


def test_resident_memory_is_in_bytes() -> None:
    before = resident_nbytes()
    held = np.frombuffer(mmap.mmap(-1, 64 << 20), dtype=np.uint8)  # pages that nobody had before
    held[:: mmap.PAGESIZE] = 1
    after = resident_nbytes()
    assert before is not None
    assert after is not None
    assert 0.8 * held.nbytes < after - before < 1.5 * held.nbytes
