"""The short way between two processes of one host: the receiver reads frames where they lie.

UCX copies a message twice over shared memory, leaves its own single copy (`cma`) out where the
failure of a peer must be noticed, and passes each message through three threads on either side.
Here the sender says over a Unix socket where a message lies, and the receiver's loop reads it into
its slot (kvfabric/peer_memory.py) and says so. Control messages go over the socket as they are.

1. The sender invites: it listens under a random name, which it also keeps in a cell of its memory.
2. The receiver accepts if it gets there, the kernel names a process of its own user, and the cell
   can be read and holds the name. Otherwise UCX carries everything, as between two hosts.
3. `begin`, once each knows: from here on both channels go this way.
4. `close` empties the cell, and only then are the sender's buffers its own again. Whoever has read
   looks at the cell again: while it holds the name, what was read is what was sent.

The contract is that of kvfabric/transport.py. This is what both ends have in common; the sender
(direct_sender.py) is the end that connects, frames go from it to the receiver (direct_receiver.py).
Linux only; elsewhere nobody accepts. Knows no UCX and no frames.
"""

import asyncio
import socket
import struct
from abc import ABC, abstractmethod
from collections import deque

from kvfabric.errors import BadFrame, FabricError, PeerLost
from kvfabric.tasks import end
from kvfabric.transport import Channel

NAME_NBYTES = 16
INVITATION = struct.Struct(f"<{NAME_NBYTES}sQ")
"""The name, and the address of the cell."""
INVITATION_NBYTES = INVITATION.size

WORDS, NOTE, TAKEN = b"w", b"n", b"t"
"""How a packet begins: a control message; where a frame lies; the oldest such frame is read."""
NOTE_PACKET = struct.Struct("<cQQ")
"""NOTE, address and length of the message."""

MAX_WAITING = 1024
"""Messages of each kind that a peer may have sent to no receive; far more than ours ever does."""

NOTICE_S = 0.05
"""From a peer's end to our saying so. The kernel tells of a killed process at once, and others who
know it better, by its control connections, are to hear of it first, as they do of UCX's word."""

_PACKET_NBYTES = 1 << 12
_CREDENTIALS = struct.Struct("<iii")  # pid, uid, gid

Buffer = bytearray | memoryview
Posted = deque[tuple[Buffer, asyncio.Future[None]]]
"""Operations in the order in which they were asked for."""


class Direct(ABC):
    """One end. Belongs to the loop that made it."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._socket: socket.socket | None = None
        self._is_on = False
        self._losing: asyncio.TimerHandle | None = None
        self._words: deque[bytes] = deque()  # that nobody has received yet
        self._hearing: Posted = deque()

    @property
    def is_on(self) -> bool:
        """Messages go this way; once it is closed, no way at all."""
        return self._is_on

    def begin(self) -> None:
        """Raises `PeerLost`."""
        assert self._socket is not None
        assert not self._is_on
        self._is_on = True
        self._loop.add_reader(self._socket, self._on_readable)

    def send(self, channel: Channel, message: bytes | memoryview) -> asyncio.Future[None]:
        sent: asyncio.Future[None] = self._loop.create_future()
        if self._socket is None:
            end(sent, _closed())
        elif channel is Channel.FRAMES:
            self._send_frame(message, sent)
        else:
            end(sent, None if self._say(WORDS + bytes(message)) else _closed())
        return sent

    def recv(self, channel: Channel, buffer: Buffer) -> asyncio.Future[None]:
        received: asyncio.Future[None] = self._loop.create_future()
        if self._socket is None:
            end(received, _closed())
        elif channel is Channel.FRAMES:
            self._recv_frame(buffer, received)
        else:
            self._hearing.append((buffer, received))
            self._hear()
        return received

    def close(self) -> None:
        """What is pending fails, here and there. Idempotent."""
        self._is_on = True
        if self._losing is not None:
            self._losing.cancel()
        if self._socket is not None:
            self._loop.remove_reader(self._socket)
            self._socket.close()
            self._socket = None
        for posted in self._pending():
            while posted:
                end(posted.popleft()[1], _closed())

    def _pending(self) -> tuple[Posted, ...]:
        return (self._hearing,)

    def _send_frame(self, message: bytes | memoryview, sent: asyncio.Future[None]) -> None:
        end(sent, PeerLost("frames come from the side that connects"))

    def _recv_frame(self, buffer: Buffer, received: asyncio.Future[None]) -> None:
        end(received, PeerLost("frames come from the side that connects"))

    @abstractmethod
    def _on_packet(self, packet: bytes) -> bool:
        """One that is no control message. False: none of ours would say it now."""

    def _on_readable(self) -> None:
        if self._socket is None:
            return
        try:
            packet = self._socket.recv(_PACKET_NBYTES)
        except BlockingIOError:
            return
        except OSError:
            packet = b""
        if packet.startswith(WORDS) and len(self._words) < MAX_WAITING:
            self._words.append(packet[len(WORDS) :])
            self._hear()
        elif not packet:
            self._lose()
        elif not self._on_packet(packet):
            self.close()

    def _lose(self) -> None:
        """The peer is gone: closes soon."""
        if self._losing is None and self._socket is not None:
            self._loop.remove_reader(self._socket)
            self._losing = self._loop.call_later(NOTICE_S, self.close)

    def _hear(self) -> None:
        while self._words and self._hearing:
            words, (buffer, heard) = self._words.popleft(), self._hearing.popleft()
            if len(words) > len(buffer):
                end(heard, BadFrame(f"longer than {len(buffer)} bytes: {len(words)}"))
            else:
                buffer[: len(words)] = words
                end(heard)

    def _say(self, packet: bytes) -> bool:
        """False: the peer is gone, or lets too much lie; the connection is about to close."""
        assert self._socket is not None
        try:
            self._socket.send(packet)
        except OSError:
            self._lose()
            return False
        return True


def new_socket() -> socket.socket:
    """Keeps packets apart, and tells of a peer's end."""
    made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    made.setblocking(False)
    return made


def credentials(connected: socket.socket) -> tuple[int, int]:
    """Process and user at the other end, as this process sees them. Raises OSError."""
    told = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(told)
    return pid, uid


def _closed() -> FabricError:
    return PeerLost("the connection is closed")
