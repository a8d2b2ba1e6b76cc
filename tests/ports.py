"""Ports for processes that tests start."""

import itertools
import random
import socket

_FIRST, _LAST = 10_000, 30_000
"""Below those that the system gives to outgoing connections: a port of theirs that is free now may
be taken before the process that is to listen there has started."""

_NEXT = itertools.cycle(range(_FIRST, _LAST))
for _ in range(random.SystemRandom().randrange(_LAST - _FIRST)):  # runs side by side differ
    next(_NEXT)


def free_port() -> int:
    """Nobody listens there, and this process has not given it out lately."""
    for port in _NEXT:
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise AssertionError("the cycle has no end")
