"""What a transport gives: connected pairs of endpoints that move whole messages.

`inproc://name` and `ucx://host:port` stand behind the same three interfaces, and the same contract
checks run against both (tests/kvfabric). The scheme of a URI picks the transport.

The rule that everything above stands on: **a buffer given to `send` or `recv` belongs to the
transport until the returned future is done.** Cancelling a wait does not end the operation; only
its completion or `abort` does. So a slot is given back when the future is done, never before.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable
from enum import IntEnum
from typing import TYPE_CHECKING

from kvfabric.errors import FabricError

if TYPE_CHECKING:
    from kvfabric.direct import Direct
    from kvfabric.faults import FaultPlan


class Channel(IntEnum):
    """Messages of one channel are matched in the order in which they were posted."""

    CONTROL = 1
    FRAMES = 2


class Endpoint(ABC):
    """One end of a connection. Belongs to the loop that made it."""

    direct: "Direct | None" = None
    """A shorter way for messages, which the handshake may switch to; None: there is none."""

    @abstractmethod
    def send(self, channel: Channel, message: bytes | memoryview) -> asyncio.Future[None]:
        """Posts a message. Fails with `PeerLost`. Small messages may complete before the peer
        receives them; large ones complete only when it has: that is the back-pressure."""

    @abstractmethod
    def recv(self, channel: Channel, buffer: bytearray | memoryview) -> asyncio.Future[None]:
        """Posts a receive. Fails with `PeerLost`, and with `BadFrame` if the message is longer
        than the buffer; a shorter one fills its first bytes, and nothing says how many."""

    @abstractmethod
    def abort(self) -> None:
        """Breaks the connection, never blocks. What is pending fails, here and at the peer."""

    @property
    @abstractmethod
    def transports(self) -> tuple[str, ...]:
        """What the messages really travel over, if the transport can tell."""


class Listener(ABC):
    @property
    @abstractmethod
    def address(self) -> str:
        """URI as this host sees it."""

    @property
    def num_turned_away(self) -> int:
        """Connections that were reset because no peer was at their far end."""
        return 0

    @abstractmethod
    def close(self) -> None:
        """No new connections; those that exist live on."""


OnEndpoint = Callable[[Endpoint], None]


class Transport(ABC):
    """Owner of what a transport needs once per process or loop."""

    @abstractmethod
    async def connect(self, address: str, seconds: float) -> Endpoint:
        """Raises `PeerLost` (nobody there) or `DeadlineExceeded`."""

    @abstractmethod
    async def listen(self, address: str, on_endpoint: OnEndpoint) -> Listener:
        """`on_endpoint` is called on this loop for each new connection."""

    @abstractmethod
    async def close(self) -> None:
        """After every endpoint is aborted and every listener closed."""


def scheme_of(address: str) -> str:
    return address.partition("://")[0]


def split_address(address: str) -> tuple[str, int]:
    """Host and port of `ucx://host:port`. Raises `FabricError`."""
    host, _, port = address.removeprefix("ucx://").rpartition(":")
    if not host or not port.isdecimal() or int(port) >= 1 << 16:
        raise FabricError(f"{address!r} is not ucx://host:port")
    return host, int(port)


def open_transport(address: str, faults: "FaultPlan | None" = None) -> Transport:
    """The transport for a URI, harmed as `faults` says. Imports are late: UCX must not be touched
    by who needs none."""
    transport = _open(address)
    if faults is None:
        return transport
    from kvfabric.faults import FaultyTransport

    return FaultyTransport(transport, faults)


def _open(address: str) -> Transport:
    match scheme_of(address):
        case "inproc":
            from kvfabric.inproc import InprocTransport

            return InprocTransport()
        case "ucx":
            from kvfabric.ucx import UCXTransport

            return UCXTransport()
        case scheme:
            raise FabricError(f"no transport for {scheme!r} in {address!r}")
