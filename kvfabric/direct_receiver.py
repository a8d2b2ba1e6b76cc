"""The receiving end of the short way within a host: see kvfabric/direct.py.

A frame is read by the loop itself: a copy of 4 MiB takes a third of a millisecond, and a hand-over
to a thread and back about as long. One is read a turn of the loop, so that what came of the one
before goes on first.
"""

import asyncio
import os
from collections import deque

from kvfabric.direct import (
    INVITATION,
    INVITATION_NBYTES,
    MAX_WAITING,
    NAME_NBYTES,
    NOTE,
    NOTE_PACKET,
    TAKEN,
    Buffer,
    Direct,
    Posted,
    credentials,
    new_socket,
)
from kvfabric.errors import BadFrame, FabricError, PeerLost
from kvfabric.peer_memory import read_memory
from kvfabric.tasks import end

_unreadable: set[int] = set()
"""Processes that are there, and whose frames could not be read: they go over UCX next time."""


class DirectReceiver(Direct):
    """See the module."""

    def __init__(self) -> None:
        super().__init__()
        self._name = b""
        self._cell = 0
        self._pid = 0
        self._notes: deque[tuple[int, int]] = deque()  # of frames that nobody has received yet
        self._posted: Posted = deque()
        self._next: asyncio.Handle | None = None

    def accept(self, invitation: bytes) -> bool:
        """Whether there is this way. Never blocks."""
        assert self._socket is None
        if len(invitation) != INVITATION_NBYTES:
            return False
        self._name, self._cell = INVITATION.unpack(invitation)
        connected = new_socket()
        try:
            connected.connect(b"\0" + self._name)
            self._pid, user = credentials(connected)
        except OSError:
            self._pid, user = 0, -1
        is_ours = self._pid > 0 and user == os.geteuid() and self._pid not in _unreadable
        if not is_ours or not self._holds():
            connected.close()
            return False
        self._socket = connected
        return True

    def close(self) -> None:
        if self._next is not None:
            self._next.cancel()
            self._next = None
        self._notes.clear()
        super().close()

    def _pending(self) -> tuple[Posted, ...]:
        return (*super()._pending(), self._posted)

    def _recv_frame(self, buffer: Buffer, received: asyncio.Future[None]) -> None:
        self._posted.append((buffer, received))
        self._read_soon()

    def _on_packet(self, packet: bytes) -> bool:
        is_note = packet.startswith(NOTE) and len(packet) == NOTE_PACKET.size
        if not is_note or len(self._notes) >= MAX_WAITING:
            return False
        _, address, nbytes = NOTE_PACKET.unpack(packet)
        self._notes.append((address, nbytes))
        self._read_soon()
        return True

    def _read_soon(self) -> None:
        if self._notes and self._posted and self._next is None and self._losing is None:
            self._next = self._loop.call_soon(self._read)

    def _read(self) -> None:
        self._next = None
        address, nbytes = self._notes.popleft()
        buffer, received = self._posted.popleft()
        error = self._read_into(memoryview(buffer), address, nbytes)
        if isinstance(error, PeerLost):
            self._posted.appendleft((buffer, received))
            self._lose()
            return
        end(received, error)
        if self._say(TAKEN):
            self._read_soon()

    def _read_into(self, buffer: memoryview, address: int, nbytes: int) -> FabricError | None:
        if nbytes > len(buffer):
            return BadFrame(f"longer than {len(buffer)} bytes: {nbytes}")
        try:
            read_memory(self._pid, address, buffer[:nbytes])
        except OSError as error:
            if self._holds():
                _unreadable.add(self._pid)
            return PeerLost(f"a frame cannot be read: {error}")
        return None if self._holds() else PeerLost("the peer has closed the connection")

    def _holds(self) -> bool:
        """Nothing that the peer lent us has become its own again."""
        name = bytearray(NAME_NBYTES)
        try:
            read_memory(self._pid, self._cell, memoryview(name))
        except OSError:
            return False
        return name == self._name
