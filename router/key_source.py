"""Where the keys come from, and when they are read again.

1. `KeySource.from_config` reads them, or says what is wrong with them.
2. `start` looks each second whether the file is another; `reload_soon` (SIGHUP) does so at once.
3. What cannot be read leaves the keys as they were: nobody is let in or locked out by a slip.
"""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Self

from router.config import RouterConfig
from router.keys import BadKeys, KeyRing, parse
from router.tasks import cancel_and_wait
from router.tenant import EVERYBODY, Grant
from runtime.log import get_logger

log = get_logger()

LOOK_S = 1.0

Mark = tuple[int, int, int]
"""By which a file is told from what it was: inode, size, time of change."""


class KeySource:
    """See the module."""

    def __init__(self, path: str, lines: str) -> None:
        """Raises BadKeys. Both empty: there are no keys, and everybody may come in."""
        self._path = Path(path) if path else None
        self._lines = lines.replace(";", "\n")
        self._mark: Mark | None = None
        self._ring = KeyRing()
        self._watching: asyncio.Task[None] | None = None
        self._soon = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self.on_reload: Callable[[bool], None] = lambda went_well: None
        self._ring, self._mark = self._read()

    @classmethod
    def from_config(cls, config: RouterConfig) -> Self:
        """Raises BadKeys."""
        return cls(config.api_keys_file, config.api_keys)

    @property
    def is_open(self) -> bool:
        """There are no keys, and are not meant to be."""
        return self._path is None and not self._lines.strip()

    @property
    def grants(self) -> tuple[Grant, ...]:
        return self._ring.grants

    def find(self, authorization: str) -> Grant | None:
        """Of a request with that header; None: it may not come in."""
        if self.is_open:
            return EVERYBODY
        scheme, _, key = authorization.partition(" ")
        return self._ring.find(key.strip()) if scheme.lower() == "bearer" else None

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        if self._path is not None:
            self._watching = asyncio.create_task(self._watch())

    async def close(self) -> None:
        if self._watching is not None:
            await cancel_and_wait(self._watching)

    def reload_soon(self) -> None:
        """From any thread, or from a signal."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._soon.set)

    async def _watch(self) -> None:
        while True:
            try:
                await asyncio.wait_for(self._soon.wait(), LOOK_S)
            except TimeoutError:
                if await asyncio.to_thread(self._look) == self._mark:
                    continue
            self._soon.clear()
            await self._reload()

    async def _reload(self) -> None:
        try:
            ring, mark = await asyncio.to_thread(self._read)
        except BadKeys as error:
            self._mark = await asyncio.to_thread(self._look)  # to say it once
            log.error("API keys not read again", problem=str(error), keys=len(self.grants))
            self.on_reload(False)
            return
        self._ring, self._mark = ring, mark
        log.info("API keys read again", keys=len(self.grants))
        self.on_reload(True)

    def _look(self) -> Mark | None:
        assert self._path is not None
        try:
            stat = self._path.stat()
        except OSError:
            return None
        return stat.st_ino, stat.st_size, stat.st_mtime_ns

    def _read(self) -> tuple[KeyRing, Mark | None]:
        sources, mark = [("--api-keys", self._lines)], None
        if self._path is not None:
            mark = self._look()  # before it is read: what changes meanwhile is read again
            try:
                sources.append((str(self._path), self._path.read_text(encoding="utf-8")))
            except (OSError, ValueError) as error:
                reason = error.strerror if isinstance(error, OSError) else "it is no UTF-8 text"
                raise BadKeys(f"{self._path} cannot be read: {reason}") from error
        return parse(*sources), mark
