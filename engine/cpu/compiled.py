"""Where compiled kernels lie on disk, and whether they do. Knows no Numba, which loads slowly.

A folder beside the prepared models, named after the sources of this package: Numba looks at the one
file a function stands in, and our functions are inlined across files. Folders of other versions go
when they have not been used for a day, but for the newest few.
"""

import hashlib
import shutil
import time
from pathlib import Path

from engine.model_cache import default_cache_root

_KEPT, _UNUSED_S = 4, 24 * 3600.0


def cache_folder() -> Path:
    digest = hashlib.sha256()
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    return default_cache_root() / "kernels" / digest.hexdigest()[:16]


def done_file(what: str) -> Path:
    """Is there, once `what` was compiled from these source files: Numba keeps code for each copy of
    a file and each time of writing."""
    digest = hashlib.sha256(str(Path(__file__).parent).encode())
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(str(source.stat().st_mtime_ns).encode())
    return cache_folder() / f"{what}-{digest.hexdigest()[:16]}.done"


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
