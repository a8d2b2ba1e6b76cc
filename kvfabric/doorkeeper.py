"""Looks once a second who stands at a listening port, and resets strangers (strangers.py).

The sockets are UCX's, found among the process's own. `connect` to no address (AF_UNSPEC) breaks a
connection in a way that UCX hears of as if the far end had reset it: it lets go of the socket and
of all that belongs to it. Reading the bytes for it, or `shutdown`, does not help: UCX goes on to
read nothing. No reuse of a number can do harm: what is examined, and what is reset, is a second
descriptor of the one socket. Knows no ucxx; Linux alone.
"""

import ctypes
import logging
import os
import resource
import socket
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from fcntl import ioctl
from termios import FIONREAD

from kvfabric.strangers import Caller, Peer, Strangers

_logger = logging.getLogger(__name__)

PERIOD_S = 1.0
_ROOM = 65536
_CLOSE_WAIT = 8  # of tcpi_state, the first byte of TCP_INFO: the far end has closed
_NOWHERE = bytes(16)  # a sockaddr of AF_UNSPEC
_INTERNET = frozenset((socket.AF_INET, socket.AF_INET6))

_libc = ctypes.CDLL(None, use_errno=True)


class Doorkeeper:
    """A thread, from `__init__` to `close`. All methods may be called from any other thread."""

    def __init__(self, port: int, period_s: float = PERIOD_S) -> None:
        self.num_turned_away = 0
        self._period_s = period_s
        self._port = port
        self._admitted: set[Peer] = set()
        self._strangers = Strangers()
        _make_room()
        self._name = (ctypes.c_ubyte * 128)()
        self._nothing = os.open(os.devnull, os.O_RDONLY)
        self._hand = os.dup(self._nothing)  # to hold others' by, also when no number is left
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ucx-door", daemon=True)
        self._thread.start()

    def admit(self, peer: Peer) -> Callable[[], None]:
        """The fabric speaks with it, until what is returned is called."""
        self._admitted.add(peer)
        return lambda: self._admitted.discard(peer)

    def close(self) -> None:
        """Waits for a look that is under way: milliseconds. Again does nothing."""
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._closed.wait(self._period_s):
            try:
                self._look()
            except OSError:
                _logger.exception("nobody looked who stands at port %d", self._port)
        os.close(self._hand)
        os.close(self._nothing)

    def _look(self) -> None:
        found = dict(self._callers())
        admitted = frozenset(self._admitted)  # read last: who became a peer meanwhile is in it
        strangers = self._strangers.judge(tuple(found), admitted)
        reset = [one.peer.host for one in strangers if self._turn_away(one, found[one])]
        if reset:
            self.num_turned_away += len(reset)
            hosts = ", ".join(sorted(set(reset))[:8])
            _logger.warning("reset %d strangers at port %d: %s", len(reset), self._port, hosts)

    def _callers(self) -> Iterator[tuple[Caller, int]]:
        """Each with the number of its descriptor."""
        for number in _numbers():
            if self._is_at_the_port(number) and (caller := self._caller(number)) is not None:
                yield caller, number

    def _is_at_the_port(self, number: int) -> bool:
        """Cheap, for it is asked of every descriptor of the process."""
        length = ctypes.c_uint(len(self._name))
        if _libc.getsockname(number, self._name, ctypes.byref(length)):
            return False
        family = int.from_bytes(bytes(self._name[:2]), sys.byteorder)
        return family in _INTERNET and self._name[2] * 256 + self._name[3] == self._port

    def _caller(self, number: int) -> Caller | None:
        """None: it is the listener, or has just gone."""
        with suppress(OSError), self._held(number) as connection:
            host, port = connection.getpeername()[:2]
            state = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 8)[0]
            unread = int.from_bytes(ioctl(connection, FIONREAD, bytes(4)), sys.byteorder)
            inode = os.fstat(connection.fileno()).st_ino
            return Caller(inode, Peer(host, port), is_stuck=unread > 0 or state == _CLOSE_WAIT)
        return None

    def _turn_away(self, stranger: Caller, number: int) -> bool:
        with suppress(OSError), self._held(number) as connection:
            if os.fstat(connection.fileno()).st_ino == stranger.inode:
                return not _libc.connect(connection.fileno(), _NOWHERE, len(_NOWHERE))
        return False

    @contextmanager
    def _held(self, number: int) -> Iterator[socket.socket]:
        os.dup2(number, self._hand, inheritable=False)
        try:
            held = socket.socket(fileno=self._hand)
            try:
                yield held
            finally:
                held.detach()
        finally:
            os.dup2(self._nothing, self._hand, inheritable=False)


def _numbers() -> Iterable[int]:
    """Of all descriptors of the process."""
    try:
        return [int(name) for name in os.listdir("/proc/self/fd")]
    except OSError:  # none is left for the listing itself: so all of them are in use
        return range(resource.getrlimit(resource.RLIMIT_NOFILE)[0])


def _make_room() -> None:
    """For descriptors, as far as this process may. At its limit UCX accepts nobody, and tries and
    complains again and again until a look has made room: 90 MB of log in a second or two."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    room = _ROOM if hard == resource.RLIM_INFINITY else min(hard, _ROOM)
    if soft != resource.RLIM_INFINITY and soft < room:
        with suppress(OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (room, hard))
