"""Writes down each message that nodes of a test post, in order, and can be a slow wire."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise

import pytest

import kvfabric.node
from kvfabric.control import Control, decode_control
from kvfabric.faults import FaultPlan
from kvfabric.frame import FrameHeader, read_frame
from kvfabric.transport import (
    Channel,
    Endpoint,
    Listener,
    OnEndpoint,
    Transport,
    open_transport,
)


@dataclass(frozen=True, slots=True)
class Posted:
    """One message."""

    by_receiver: bool
    """By who listens: it goes back."""
    what: FrameHeader | Control
    done: asyncio.Future[None]

    @property
    def kind(self) -> str:
        return (
            self.what.kind.name if isinstance(self.what, FrameHeader) else type(self.what).__name__
        )


class WireTap:
    """See the module."""

    def __init__(self) -> None:
        self.posted: list[Posted] = []
        self.frame_turns = 0
        """Turns of the loop that the wire takes for each frame, one after the other."""
        self.wire = asyncio.Lock()

    @property
    def frames(self) -> list[tuple[FrameHeader, asyncio.Future[None]]]:
        return [(one.what, one.done) for one in self.posted if isinstance(one.what, FrameHeader)]

    def num_turns(self) -> int:
        """How often the direction of the messages has changed."""
        ways = [one.by_receiver for one in self.posted]
        return sum(a != b for a, b in pairwise(ways))


class _TappedEndpoint(Endpoint):
    def __init__(self, inner: Endpoint, tap: WireTap, by_receiver: bool) -> None:
        self._inner = inner
        self._tap = tap
        self._by_receiver = by_receiver

    def send(self, channel: Channel, message: bytes | memoryview) -> asyncio.Future[None]:
        is_frame = channel is Channel.FRAMES
        what = read_frame(memoryview(message)) if is_frame else decode_control(bytes(message))
        done: asyncio.Future[None]
        if is_frame and self._tap.frame_turns:
            done = asyncio.ensure_future(self._send_slowly(message))
        else:
            done = self._inner.send(channel, message)
        self._tap.posted.append(Posted(self._by_receiver, what, done))
        return done

    async def _send_slowly(self, message: bytes | memoryview) -> None:
        async with self._tap.wire:
            for _ in range(self._tap.frame_turns):
                await asyncio.sleep(0)
            await self._inner.send(Channel.FRAMES, message)

    def recv(self, channel: Channel, buffer: bytearray | memoryview) -> asyncio.Future[None]:
        return self._inner.recv(channel, buffer)

    def abort(self) -> None:
        self._inner.abort()

    @property
    def transports(self) -> tuple[str, ...]:
        return self._inner.transports


class _TappedTransport(Transport):
    def __init__(self, inner: Transport, tap: WireTap) -> None:
        self._inner = inner
        self._tap = tap

    async def connect(self, address: str, seconds: float) -> Endpoint:
        return _TappedEndpoint(await self._inner.connect(address, seconds), self._tap, False)

    async def listen(self, address: str, on_endpoint: OnEndpoint) -> Listener:
        def tapped(endpoint: Endpoint) -> None:
            on_endpoint(_TappedEndpoint(endpoint, self._tap, True))

        return await self._inner.listen(address, tapped)

    async def close(self) -> None:
        await self._inner.close()


@contextmanager
def wire_tap(monkeypatch: pytest.MonkeyPatch) -> Iterator[WireTap]:
    """Of all nodes made inside."""
    tap = WireTap()

    def tapped(address: str, faults: FaultPlan | None = None) -> Transport:
        return _TappedTransport(open_transport(address, faults), tap)

    with monkeypatch.context() as patch:
        patch.setattr(kvfabric.node, "open_transport", tapped)
        yield tap
