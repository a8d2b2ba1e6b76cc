"""An end of the socket between a worker's rank 0 and another of its ranks."""

import asyncio
import socket

from kvfabric.ranks.messages import Message, decode, encode

MAX_LINE_NBYTES = 64 << 20
"""Far more than the block ids of any prompt."""


class RankChannel:
    """Messages in order, both ways. Belongs to the loop that opened it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def open(cls, end: socket.socket) -> "RankChannel":
        """`end` of a stream socket pair; the channel's own from now on."""
        return cls(*await asyncio.open_connection(sock=end, limit=MAX_LINE_NBYTES))

    def send(self, message: Message) -> None:
        """Never waits. Nothing comes of it when the other end is gone: `receive` tells of that."""
        if not self._writer.is_closing():
            self._writer.write(encode(message))

    async def receive(self) -> Message | None:
        """None: the other end is gone, or this one is closed."""
        try:
            line = await self._reader.readline()
        except OSError:
            return None
        return decode(line) if line.endswith(b"\n") else None

    def close(self) -> None:
        self._writer.close()
