"""Asks UCX over which transports an endpoint's messages travel, and whence it came.

ucxx does not tell, but `ucp_ep_query` of the library under it does. Worth the few lines of ctypes:
UCX falls back from shared memory to TCP without a word, at a fifth of the speed. Knows no ucxx.
"""

import ctypes
import socket
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from kvfabric.strangers import Peer

_REMOTE_SOCKADDR_FIELD = 1 << 2  # UCP_EP_ATTR_FIELD_REMOTE_SOCKADDR
_TRANSPORTS_FIELD = 1 << 3  # UCP_EP_ATTR_FIELD_TRANSPORTS
_MAX_LANES = 16


class _Lane(ctypes.Structure):
    _fields_ = (("transport", ctypes.c_char_p), ("device", ctypes.c_char_p))


class _Lanes(ctypes.Structure):
    _fields_ = (
        ("entries", ctypes.POINTER(_Lane)),
        ("num_entries", ctypes.c_uint),
        ("entry_size", ctypes.c_size_t),
    )


class _EndpointAttributes(ctypes.Structure):  # ucp_ep_attr_t of UCX 1.12 and later
    _fields_ = (
        ("field_mask", ctypes.c_uint64),
        ("name", ctypes.c_char * 32),
        ("local_sockaddr", ctypes.c_ubyte * 128),
        ("remote_sockaddr", ctypes.c_ubyte * 128),
        ("lanes", _Lanes),
        ("user_data", ctypes.c_void_p),
    )


@cache
def libucp() -> ctypes.CDLL | None:
    package = find_spec("libucx")
    if package is None or not package.submodule_search_locations:
        return None
    folder = Path(package.submodule_search_locations[0], "lib")
    libraries = sorted(folder.glob("libucp.so*"))
    return ctypes.CDLL(str(libraries[0])) if libraries else None


def endpoint_lanes(ucp_endpoint: int) -> tuple[str, ...]:
    """Names like ("posix", "sysv", "tcp"), sorted; empty if UCX cannot be asked."""
    library = libucp()
    if library is None:
        return ()
    lanes = (_Lane * _MAX_LANES)()
    attributes = _EndpointAttributes(field_mask=_TRANSPORTS_FIELD)
    attributes.lanes = _Lanes(lanes, _MAX_LANES, ctypes.sizeof(_Lane))
    status = library.ucp_ep_query(ctypes.c_void_p(ucp_endpoint), ctypes.byref(attributes))
    if status != 0:
        return ()
    names = {lane.transport for lane in lanes[: attributes.lanes.num_entries]}
    return tuple(sorted(name.decode() for name in names if name))


def endpoint_peer(ucp_endpoint: int) -> Peer | None:
    """Whose connection to our listener it grew from; None if UCX cannot tell: it broke, or is none
    of TCP's."""
    library = libucp()
    if library is None:
        return None
    attributes = _EndpointAttributes(field_mask=_REMOTE_SOCKADDR_FIELD)
    if library.ucp_ep_query(ctypes.c_void_p(ucp_endpoint), ctypes.byref(attributes)) != 0:
        return None
    name = bytes(attributes.remote_sockaddr)
    family, port = int.from_bytes(name[:2], sys.byteorder), int.from_bytes(name[2:4], "big")
    match family:
        case socket.AF_INET:
            return Peer(socket.inet_ntop(family, name[4:8]), port)
        case socket.AF_INET6:
            return Peer(socket.inet_ntop(family, name[8:24]), port)
    return None
