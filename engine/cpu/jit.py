"""Numba as this engine uses it: compiled for this CPU, without the GIL, kept on disk.

The compiled code lies beside the prepared models, in a folder named after the sources of this
package: Numba looks at the one file a function stands in, and our functions are inlined across
files. Folders of other versions go when they have not been used for a day, but for the newest few.
"""

import fcntl
import hashlib
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numba

from engine.model_cache import default_cache_root

_Function = TypeVar("_Function", bound=Callable[..., Any])


_KEPT, _UNUSED_S = 4, 24 * 3600.0


def _cache_folder() -> Path:
    digest = hashlib.sha256()
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    return default_cache_root() / "kernels" / digest.hexdigest()[:16]


def _keep_code() -> bool:
    """False where the folder cannot be written: then each process compiles for itself."""
    try:
        folder = _cache_folder()
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    numba.config.CACHE_DIR = str(folder)
    if not os.access(folder, os.W_OK):
        return False
    os.utime(folder)
    remove_old(folder.parent)
    return True


def remove_old(kernels: Path) -> None:
    """Folders of sources that nobody has used of late; a few stay, whatever their age."""
    try:
        last_used = {folder: folder.stat().st_mtime for folder in kernels.iterdir()}
    except OSError:  # another process is at it
        return
    newest_first = sorted(last_used, key=lambda folder: last_used[folder], reverse=True)
    for folder in newest_first[_KEPT:]:
        if last_used[folder] < time.time() - _UNUSED_S:
            shutil.rmtree(folder, ignore_errors=True)


_CACHE = _keep_code()


def _copy_name() -> str:
    """Of these source files: Numba keeps code for each copy of a file and each time of writing."""
    digest = hashlib.sha256(str(Path(__file__).parent).encode())
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(str(source.stat().st_mtime_ns).encode())
    return digest.hexdigest()[:16]


@contextmanager
def compiling(what: str) -> Iterator[None]:
    """One process at a time compiles `what` on a machine; those that waited find it on disk. Nobody
    waits where that was done before."""
    folder = _cache_folder()
    done = folder / f"{what}-{_copy_name()}.done"
    if not _CACHE or done.exists():
        yield
        return
    with (folder / f"{what}.lock").open("w") as lock:
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
