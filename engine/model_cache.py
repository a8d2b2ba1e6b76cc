"""Prepared models on disk: made once, whole or not at all, by one process at a time.

    <root>/models/<key>/         a finished model; its marker lists every file and its size
    <root>/models/<key>.lock     held (flock) while somebody checks or makes it
    <root>/models/<key>.part-*   being made; a leftover is swept by the next holder of the lock

A model is made in a `.part-*` folder, its marker is written last, and the folder is renamed into
place. A folder whose files are not what its marker says is made again.
"""

import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

_MARKER = ".baton-prepared.json"


def default_cache_root() -> Path:
    """$BATON_CACHE, else baton/ in the XDG cache folder."""
    own = os.environ.get("BATON_CACHE")
    if own:
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "baton"


class ModelCache:
    """See the module. Safe between processes on one machine."""

    def __init__(self, root: Path, on_wait: Callable[[], None] = lambda: None) -> None:
        """`on_wait` is called when another process holds the lock, before waiting for it."""
        self._models = root / "models"
        self._on_wait = on_wait

    def get_or_make(self, key: str, make: Callable[[Path], None]) -> Path:
        """The folder of the model; `make` fills an empty one. What `make` raises leaves nothing
        behind. Raises OSError where the cache itself cannot be written."""
        self._models.mkdir(parents=True, exist_ok=True)
        folder = self._models / key
        with self._locked(key):
            if not is_intact(folder):
                self._make(folder, make)
        return folder

    def _make(self, folder: Path, make: Callable[[Path], None]) -> None:
        for leftover in (*self._models.glob(f"{folder.name}.part-*"), folder):
            shutil.rmtree(leftover, ignore_errors=True)
        part = Path(tempfile.mkdtemp(prefix=f"{folder.name}.part-", dir=self._models))
        try:
            make(part)
            _seal(part)
            part.rename(folder)
        finally:
            shutil.rmtree(part, ignore_errors=True)  # gone already, if it was renamed

    @contextmanager
    def _locked(self, key: str) -> Iterator[None]:
        with (self._models / f"{key}.lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self._on_wait()
                fcntl.flock(lock, fcntl.LOCK_EX)
            yield  # closing the file unlocks


def find(root: Path, key: str) -> Path | None:
    """The folder of a model that was made, if it is whole; nobody is waited for."""
    folder = root / "models" / key
    return folder if is_intact(folder) else None


def is_intact(folder: Path) -> bool:
    """The marker is there, and so is every file it lists, with its size."""
    try:
        sizes = json.loads((folder / _MARKER).read_text(encoding="utf-8"))
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, AttributeError):
        return False


def _seal(folder: Path) -> None:
    """Readable by everybody; the marker last."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    sizes = {str(path.relative_to(folder)): path.stat().st_size for path in files}
    marker = folder / _MARKER
    marker.write_text(json.dumps(sizes, indent=1), encoding="utf-8")
    for path in (*files, marker):
        path.chmod(0o644)
    folder.chmod(0o755)
