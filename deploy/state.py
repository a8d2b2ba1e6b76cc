"""What a running cluster leaves in its run directory: a lock, `cluster.json`, one log a process.

1. `RunDir(path)` as a context takes the lock; a second cluster there is refused.
2. `write` replaces `cluster.json` in one step: a reader sees the old list or the new one.
3. On leaving, `cluster.json` and the admin API's token go; the logs stay. After a kill -9 they
   stay, but the lock is free.
"""

import fcntl
import json
import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self


class RunDirUnusable(Exception):
    """Another cluster runs in this directory, or it cannot be written."""


@dataclass(frozen=True, slots=True)
class Member:
    """One process of the cluster, as `cluster.json` tells it."""

    name: str
    role: str
    pid: int
    addresses: Mapping[str, str]
    """host:port by what is spoken there: `http` and `admin`, or `grpc`; and `metrics`."""
    log: str


class RunDir:
    """A directory that belongs to one running cluster."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self._lock_fd = -1

    def log(self, name: str) -> Path:
        return self.path / f"{name}.log"

    def write(self, members: Sequence[Member]) -> None:
        text = json.dumps([asdict(member) for member in members], indent=2) + "\n"
        new = self.cluster_file.with_suffix(".new")
        new.write_text(text)
        new.replace(self.cluster_file)

    def draw_admin_token(self) -> None:
        """Another one, which only this user may read."""
        self.admin_token_file.unlink(missing_ok=True)
        fd = os.open(self.admin_token_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(fd, "w") as file:
            file.write(secrets.token_urlsafe(32) + "\n")

    @property
    def cluster_file(self) -> Path:
        return self.path / "cluster.json"

    @property
    def admin_token_file(self) -> Path:
        return self.path / "admin-token"

    def __enter__(self) -> Self:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock_fd = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise RunDirUnusable(f"cannot use {self.path} as run directory: {error}") from None
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock_fd)
            raise RunDirUnusable(
                f"another cluster runs in {self.path}; stop it, or choose another --run-dir"
            ) from None
        self.cluster_file.unlink(missing_ok=True)
        return self

    def __exit__(self, *exception: object) -> None:
        self.cluster_file.unlink(missing_ok=True)
        self.admin_token_file.unlink(missing_ok=True)
        os.close(self._lock_fd)
