"""A way to the router that a test can shut: connections through it break, and none is taken."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx


class Door:
    """Listens on a port of its own, the same one each time that it opens."""

    def __init__(self, url: str) -> None:
        self._to = httpx.URL(url)
        self._port = 0
        self._server: asyncio.Server | None = None
        self._pipes: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    async def open(self) -> None:
        self._server = await asyncio.start_server(self._pass, "127.0.0.1", self._port)
        self._port = self._server.sockets[0].getsockname()[1]

    async def shut(self) -> None:
        assert self._server is not None
        self._server.close()
        for pipe in self._pipes:
            pipe.cancel()
        await asyncio.gather(*self._pipes, return_exceptions=True)

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(self._to.host, self._to.port)
        for source, sink in ((reader, back), (there, writer)):
            pipe = asyncio.create_task(_pipe(source, sink))
            self._pipes.add(pipe)
            pipe.add_done_callback(self._pipes.discard)


async def _pipe(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    try:
        while data := await source.read(65536):
            sink.write(data)
            await sink.drain()
    except OSError:
        return  # one of the two has left
    finally:
        sink.transport.abort()


@asynccontextmanager
async def door_to(url: str) -> AsyncIterator[Door]:
    door = Door(url)
    await door.open()
    try:
        yield door
    finally:
        await door.shut()
