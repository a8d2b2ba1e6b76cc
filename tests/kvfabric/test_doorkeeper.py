"""A listener that, like UCX's, keeps whoever connects; and who is left at it."""

import errno
import os
import resource
import select
import socket
import threading
from collections.abc import Iterator

import pytest

from kvfabric.doorkeeper import Doorkeeper
from kvfabric.strangers import MAX_LOOKS, Peer

LOOK_S = 0.01


class Listener:
    def __init__(self) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._socket.getsockname()[1]
        self.accepted: list[socket.socket] = []
        self.callers: list[socket.socket] = []

    def caller(self, sent: bytes = b"") -> socket.socket:
        """One that is connected; its other end is the last of `accepted`."""
        caller = socket.create_connection(("127.0.0.1", self.port), 2)
        caller.sendall(sent)
        self.callers.append(caller)
        self.accepted.append(self._socket.accept()[0])
        return caller

    def close(self) -> None:
        for one in (self._socket, *self.accepted, *self.callers):
            one.close()


@pytest.fixture
def listener() -> Iterator[Listener]:
    listener = Listener()
    yield listener
    listener.close()


@pytest.fixture
def door(listener: Listener) -> Iterator[Doorkeeper]:
    def held() -> tuple[int, int]:
        return threading.active_count(), len(os.listdir("/proc/self/fd"))

    before = held()
    door = Doorkeeper(listener.port, LOOK_S)
    yield door
    door.close()
    listener.close()
    assert held() == (before[0], before[1] - 1), "the listener's is gone too"


def is_reset(caller: socket.socket, within_s: float = 5.0) -> bool:
    caller.settimeout(within_s)
    try:
        assert caller.recv(1) == b"", "nobody ever sends"
    except ConnectionResetError:
        return True
    except TimeoutError:
        return False
    return False


@pytest.mark.parametrize("sent", [b"", b"abc"])
def test_who_says_nothing_that_is_read_is_reset(
    listener: Listener, door: Doorkeeper, sent: bytes
) -> None:
    assert is_reset(listener.caller(sent))
    door.close()  # it counts when a look is over
    assert door.num_turned_away == 1


def test_the_listener_s_owner_hears_of_it_as_of_a_reset_by_the_far_end(
    listener: Listener, door: Doorkeeper
) -> None:
    with select.epoll() as events:
        listener.caller().shutdown(socket.SHUT_WR)
        (accepted,) = listener.accepted
        events.register(accepted, select.EPOLLERR)
        ((number, mask),) = events.poll(5)
    assert number == accepted.fileno()
    assert mask & select.EPOLLERR
    assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == errno.ECONNRESET


def test_a_peer_is_left_alone_until_it_is_none_any_more(
    listener: Listener, door: Doorkeeper
) -> None:
    caller = listener.caller(b"unread")
    peer = Peer(*caller.getsockname())
    dismiss = door.admit(peer)
    assert not is_reset(caller, 3 * MAX_LOOKS * LOOK_S)
    dismiss()
    assert is_reset(caller)


def test_other_ports_are_none_of_its_business(listener: Listener, door: Doorkeeper) -> None:
    other = Listener()
    try:
        elsewhere = other.caller(b"unread")
        assert is_reset(listener.caller())
        assert not is_reset(elsewhere, 3 * MAX_LOOKS * LOOK_S)
    finally:
        other.close()


def test_it_sees_strangers_when_no_descriptor_is_left(listener: Listener, door: Doorkeeper) -> None:
    callers = [listener.caller() for _ in range(3)]
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(name) for name in os.listdir("/proc/self/fd"))
    free = highest + 1 - len(os.listdir("/proc/self/fd"))
    taken: list[int] = []
    try:
        taken += [os.dup(0) for _ in range(free + 1)]  # the listing took one itself
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, limits[1]))
        with pytest.raises(OSError, match="Too many open files"):
            os.listdir("/proc/self/fd")
        assert all(map(is_reset, callers))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for number in taken:
            os.close(number)


def test_a_flood_of_a_thousand_is_gone_while_it_is_still_there(
    listener: Listener, door: Doorkeeper
) -> None:
    callers = [listener.caller() for _ in range(1000)]
    assert all(map(is_reset, callers))
    door.close()  # it counts when a look is over
    assert door.num_turned_away == len(callers)
