"""`inproc://name`: endpoints within one process, on one event loop or several.

It copies like a network would and has its manners: small messages complete at once, large ones
when they are received. A connection is two pipes per channel; whoever posts the second half of a
match (the send or the receive) copies, whichever thread it is on.
"""

import asyncio
import itertools
import threading
from collections import deque
from dataclasses import dataclass

from kvfabric.errors import BadFrame, FabricError, PeerLost
from kvfabric.tasks import end
from kvfabric.transport import Channel, Endpoint, Listener, OnEndpoint, Transport

_EAGER_NBYTES = 8192

_lock = threading.Lock()
_listeners: dict[str, "_InprocListener"] = {}
_anonymous = itertools.count(1)


@dataclass(frozen=True, slots=True)
class _Posted:
    """One posted operation: its buffer and the future that gives the buffer back."""

    buffer: memoryview
    done: asyncio.Future[None]

    def resolve(self, error: FabricError | None = None) -> None:
        loop = self.done.get_loop()
        if not loop.is_closed():
            loop.call_soon_threadsafe(end, self.done, error)


class _Pipe:
    """One direction of one channel."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sends: deque[_Posted] = deque()
        self._recvs: deque[_Posted] = deque()
        self._broken = False

    def send(self, posted: _Posted) -> None:
        with self._lock:
            if self._broken:
                posted.resolve(PeerLost("the connection is closed"))
            elif len(posted.buffer) <= _EAGER_NBYTES:
                self._sends.append(_Posted(memoryview(bytes(posted.buffer)), posted.done))
                posted.resolve()
            else:
                self._sends.append(posted)
            self._match()

    def recv(self, posted: _Posted) -> None:
        with self._lock:
            if self._broken:
                posted.resolve(PeerLost("the connection is closed"))
                return
            self._recvs.append(posted)
            self._match()

    def break_off(self) -> None:
        with self._lock:
            self._broken = True
            for posted in (*self._sends, *self._recvs):
                posted.resolve(PeerLost("the connection was closed"))
            self._sends.clear()
            self._recvs.clear()

    def _match(self) -> None:
        while self._sends and self._recvs:
            send, recv = self._sends.popleft(), self._recvs.popleft()
            nbytes = len(send.buffer)
            if nbytes > len(recv.buffer):
                recv.resolve(BadFrame(f"{nbytes} bytes came for {len(recv.buffer)}"))
            else:
                recv.buffer[:nbytes] = send.buffer
                recv.resolve()
            send.resolve()


class _InprocEndpoint(Endpoint):
    def __init__(self, out: dict[Channel, _Pipe], into: dict[Channel, _Pipe]) -> None:
        self._out = out
        self._into = into

    def send(self, channel: Channel, message: bytes | memoryview) -> asyncio.Future[None]:
        done = asyncio.get_running_loop().create_future()
        self._out[channel].send(_Posted(memoryview(message), done))
        return done

    def recv(self, channel: Channel, buffer: bytearray | memoryview) -> asyncio.Future[None]:
        done = asyncio.get_running_loop().create_future()
        self._into[channel].recv(_Posted(memoryview(buffer), done))
        return done

    def abort(self) -> None:
        for pipe in (*self._out.values(), *self._into.values()):
            pipe.break_off()

    @property
    def transports(self) -> tuple[str, ...]:
        return ("inproc",)


class _InprocListener(Listener):
    def __init__(self, name: str, on_endpoint: OnEndpoint) -> None:
        self._name = name
        self._loop = asyncio.get_running_loop()
        self._on_endpoint = on_endpoint

    @property
    def address(self) -> str:
        return f"inproc://{self._name}"

    def deliver(self, endpoint: Endpoint) -> None:
        self._loop.call_soon_threadsafe(self._on_endpoint, endpoint)

    def close(self) -> None:
        with _lock:
            if _listeners.get(self._name) is self:
                del _listeners[self._name]


class InprocTransport(Transport):
    async def connect(self, address: str, seconds: float) -> Endpoint:
        there = {channel: _Pipe() for channel in Channel}
        back = {channel: _Pipe() for channel in Channel}
        with _lock:
            listener = _listeners.get(address.removeprefix("inproc://"))
            if listener is None:
                raise PeerLost(f"nobody listens on {address}")
            listener.deliver(_InprocEndpoint(out=back, into=there))
        return _InprocEndpoint(out=there, into=back)

    async def listen(self, address: str, on_endpoint: OnEndpoint) -> Listener:
        with _lock:
            name = address.removeprefix("inproc://") or f"anonymous-{next(_anonymous)}"
            if name in _listeners:
                raise FabricError(f"{address} is taken")
            listener = _listeners[name] = _InprocListener(name, on_endpoint)
        return listener

    async def close(self) -> None:
        pass
