"""Messages between rank 0 and one other rank, over a connected pair of stream sockets.

    header   kind u8, 3 bytes unused, payload length u32
    payload  by kind, little endian; arrays as they lie in memory (both ends are on one host)

Rank 0 says what its own model is about to do, before it does it; the other rank does the same on
its part. So they meet in the collectives, and nothing is said about results.

    to the rank     FORWARD, PROMPT_LOGITS, COPY_BLOCKS, SWAP_OUT, SWAP_IN, SWAP_DROP, CLOSE
    to rank 0       LOADED once, then SWAPPED for each swap; FAILED at the end, if it failed
"""

import socket
import struct
import threading
from enum import IntEnum
from typing import NamedTuple

_HEADER = struct.Struct("<B3xI")
_SEND_TIMEOUT = struct.pack("@ll", 60, 0)
"""A struct timeval: a rank that reads nothing for so many seconds does not live."""


class Kind(IntEnum):
    LOADED = 1
    FAILED = 2
    SWAPPED = 3
    FORWARD = 16
    PROMPT_LOGITS = 17
    COPY_BLOCKS = 18
    SWAP_OUT = 19
    SWAP_IN = 20
    SWAP_DROP = 21
    CLOSE = 31


class Message(NamedTuple):
    kind: Kind
    payload: bytearray


class StepChannel:
    """One end. Any thread sends, one receives."""

    def __init__(self, sock: socket.socket) -> None:
        """Takes the socket over."""
        sock.setblocking(True)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _SEND_TIMEOUT)
        self._socket = sock
        self._sending = threading.Lock()

    def send(self, kind: Kind, *parts: bytes | memoryview) -> None:
        """Raises OSError if the other end is gone, or does not read."""
        payload = b"".join(parts)
        with self._sending:
            self._socket.sendall(_HEADER.pack(kind, len(payload)) + payload)

    def receive(self) -> Message | None:
        """Blocks; None: the other end is gone, or this one was `shut`."""
        try:
            header = self._read(_HEADER.size)
            if header is None:
                return None
            kind, nbytes = _HEADER.unpack(header)
            payload = self._read(nbytes)
        except OSError:
            return None
        return None if payload is None else Message(Kind(kind), payload)

    def shut(self) -> None:
        """Any thread: both ends find that the other is gone."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # it was gone already

    def close(self) -> None:
        self._socket.close()

    def _read(self, nbytes: int) -> bytearray | None:
        buffer = bytearray(nbytes)
        rest = memoryview(buffer)
        while rest:
            count = self._socket.recv_into(rest)
            if count == 0:
                return None
            rest = rest[count:]
        return buffer
