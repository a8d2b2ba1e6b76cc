"""What all tests share: models to run, and the proof that a test left no thread behind."""

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

_LASTING = ("pytest_timeout", "asyncio_", "_poll_wrapper", "TMonitor")
"""Threads of libraries that live as long as the process: pytest's clock, asyncio's default
executor, grpc.aio's poller, tqdm's monitor."""


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """Folder of the real model, prepared once (about half a minute the first time)."""
    command = [sys.executable, "-m", "engine.prepare", "--model", "smollm2"]
    prepared = subprocess.run(command, check=True, stdout=subprocess.PIPE, timeout=300)
    return Path(json.loads(prepared.stdout)["path"])


@pytest.fixture(autouse=True)
def no_leaked_threads() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    deadline = time.monotonic() + 2.0
    while leaked := [t for t in threading.enumerate() if t not in before and _is_ours(t)]:
        assert time.monotonic() < deadline, f"threads left behind: {leaked}"
        time.sleep(0.02)


def _is_ours(thread: threading.Thread) -> bool:
    names = (thread.name, type(thread).__name__)
    return thread.is_alive() and not any(lasting in name for lasting in _LASTING for name in names)
