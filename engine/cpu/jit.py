"""Numba as this engine uses it: compiled for this CPU, without the GIL, kept on disk
(compiled.py)."""

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import numba

from engine.cpu.compiled import cache_folder, done_file, remove_old

_Function = TypeVar("_Function", bound=Callable[..., Any])


def _keep_code() -> bool:
    """False where the folder cannot be written: then each process compiles for itself."""
    try:
        folder = cache_folder()
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    numba.config.CACHE_DIR = str(folder)
    if not os.access(folder, os.W_OK):
        return False
    os.utime(folder)
    remove_old(folder.parent)
    return True


_CACHE = _keep_code()


@contextmanager
def compiling(what: str) -> Iterator[None]:
    """One process at a time compiles `what` on a machine; those that waited find it on disk. Nobody
    waits where that was done before."""
    done = done_file(what)
    if not _CACHE or done.exists():
        yield
        return
    with (done.parent / f"{what}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield  # closing the file unlocks
    done.touch()


def kernel(function: _Function) -> _Function:
    """Compiled at its first call, for the types it is called with. Division by zero and indices
    are not checked. It may not allocate, and its arrays are borrowed: counting references to them
    would cost an atomic operation for each array of each call, more than many a kernel."""
    options = {"nogil": True, "error_model": "numpy", "boundscheck": False, "_nrt": False}
    compiled: _Function = numba.njit(cache=_CACHE, **options)(function)
    return compiled
