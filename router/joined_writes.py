"""What h11 says of an answer, in as few writes as may be.

Each write is a call of the system, and one that wakes the client: its head alone, then the first of
its body, then the end, each wakes it for nothing. Here what belongs to one moment is written at
once: at the end of a message, or before the loop goes on to something else.
"""

import asyncio
from collections.abc import Callable

import h11

_MAX_NBYTES = 64 << 10
"""Held back at most: who asks whether the client still reads must not ask in vain."""


class JoinedWrites(h11.Connection):
    """A server's connection. `send` returns what is to be written now; `flush` is called when the
    loop goes on and something is held back: it is to write `take()`."""

    def __init__(
        self, max_head_nbytes: int, loop: asyncio.AbstractEventLoop, flush: Callable[[], None]
    ) -> None:
        super().__init__(h11.SERVER, max_head_nbytes)
        self._loop = loop
        self._flush = flush
        self._held = b""

    def send(self, event: h11.Event) -> bytes | None:  # type: ignore[override]
        output = super().send(event)
        if output is None:
            return None
        if not self._held and isinstance(event, (h11.Response, h11.Data)):
            self._loop.call_soon(self._flush)
        self._held += output
        is_whole = not isinstance(event, (h11.Response, h11.Data))
        return self.take() if is_whole or len(self._held) > _MAX_NBYTES else b""

    def take(self) -> bytes:
        held, self._held = self._held, b""
        return held
