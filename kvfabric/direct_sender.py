"""The sending end of the short way within a host: see kvfabric/direct.py."""

import asyncio
import ctypes
import os
import secrets
import socket
from collections import deque

from kvfabric.direct import (
    INVITATION,
    NAME_NBYTES,
    NOTE,
    NOTE_PACKET,
    TAKEN,
    Direct,
    Posted,
    credentials,
    new_socket,
)
from kvfabric.errors import PeerLost
from kvfabric.peer_memory import address_of
from kvfabric.tasks import end


class DirectSender(Direct):
    """See the module."""

    def __init__(self) -> None:
        super().__init__()
        self._cell = ctypes.create_string_buffer(secrets.token_bytes(NAME_NBYTES), NAME_NBYTES)
        self._listener: socket.socket | None = None
        self._lying: Posted = deque()  # messages that the peer has not read yet

    def invite(self) -> bytes:
        """What the peer's `accept` needs; empty where there are no such sockets."""
        assert self._listener is None
        listener = new_socket()
        try:
            listener.bind(b"\0" + self._cell.raw)  # in no folder
            listener.listen(1)
        except OSError:
            listener.close()
            return b""
        self._listener = listener
        return INVITATION.pack(self._cell.raw, ctypes.addressof(self._cell))

    def begin(self) -> None:
        """The peer has accepted. Raises `PeerLost`."""
        assert self._listener is not None
        while self._socket is None:
            try:
                accepted, _ = self._listener.accept()
                accepted.setblocking(False)
                _, user = credentials(accepted)
            except OSError as error:
                raise PeerLost(f"nobody has come to our socket: {error}") from error
            if user == os.geteuid():
                self._socket = accepted
            else:
                accepted.close()
        self.withdraw()
        super().begin()

    def withdraw(self) -> None:
        """Nobody is waited for any more."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    def close(self) -> None:
        ctypes.memset(self._cell, 0, NAME_NBYTES)
        self.withdraw()
        super().close()

    def _pending(self) -> tuple[Posted, ...]:
        return (*super()._pending(), self._lying)

    def _send_frame(self, message: bytes | memoryview, sent: asyncio.Future[None]) -> None:
        there = memoryview(message)
        buffer = memoryview(bytearray(there)) if there.readonly else there
        self._lying.append((buffer, sent))
        self._say(NOTE_PACKET.pack(NOTE, address_of(buffer), len(buffer)))

    def _on_packet(self, packet: bytes) -> bool:
        if packet != TAKEN or not self._lying:
            return False
        end(self._lying.popleft()[1])
        return True
