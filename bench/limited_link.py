"""A link of so many Gbit/s, between this network namespace and a new one (veth, tbf); Linux, root.

What runs on the other side is started with `Link.prefix`. UCX must not have been used before: it is
told which device to take.
"""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

_BURST_S = 0.002
"""So much at line rate in one go; less than the kernel's timer would not reach the rate."""


@dataclass(frozen=True, slots=True)
class Link:
    """Addresses here and there, and what to put before a command that is to run there."""

    here: str
    there: str
    prefix: tuple[str, ...]


LOOPBACK = Link("127.0.0.1", "127.0.0.1", ())


class NotPermitted(Exception):
    """This machine, or this user, has no network namespaces."""


@contextmanager
def limited_link(gbit_s: float) -> Iterator[Link]:
    """What comes from there is limited. Raises NotPermitted."""
    name, here, there = f"baton{os.getpid()}", f"bt{os.getpid()}a", f"bt{os.getpid()}b"
    link = Link("10.213.0.1", "10.213.0.2", ("ip", "netns", "exec", name))
    burst = max(round(gbit_s * 1e9 / 8 * _BURST_S), 256 << 10)
    inside = ("ip", "netns", "exec", name)
    try:
        _do("ip", "netns", "add", name)
        try:
            _do("ip", "link", "add", here, "type", "veth", "peer", "name", there)
            _do("ip", "link", "set", there, "netns", name)
            _do("ip", "addr", "add", f"{link.here}/30", "dev", here)
            _do("ip", "link", "set", here, "up")
            _do(*inside, "ip", "addr", "add", f"{link.there}/30", "dev", there)
            _do(*inside, "ip", "link", "set", there, "up")
            _do(*inside, "ip", "link", "set", "lo", "up")
            shape = ("rate", f"{gbit_s}gbit", "burst", str(burst), "latency", "50ms")
            _do(*inside, "tc", "qdisc", "add", "dev", there, "root", "tbf", *shape)
            os.environ |= {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": here}
            yield Link(link.here, link.there, (*inside, "env", f"UCX_NET_DEVICES={there}"))
        finally:
            subprocess.run(("ip", "netns", "del", name), check=False)
    except (FileNotFoundError, subprocess.CalledProcessError) as error:
        raise NotPermitted(str(error)) from error


def _do(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)
