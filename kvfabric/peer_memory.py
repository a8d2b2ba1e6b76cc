"""Reading the memory of another process of this host and user, by the kernel (Linux)."""

import ctypes
import os
from collections.abc import Callable
from functools import cache


class _Vector(ctypes.Structure):  # struct iovec
    _fields_ = (("base", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


def read_memory(pid: int, address: int, buffer: memoryview) -> None:
    """Fills the buffer, without the GIL. Raises OSError, also where only a part can be read."""
    if not len(buffer):
        return
    here, there = _Vector(address_of(buffer), len(buffer)), _Vector(address, len(buffer))
    count = _process_vm_readv()(pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
    if count != len(buffer):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number) if count < 0 else f"only {count} bytes")


def address_of(buffer: memoryview) -> int:
    """Of writable memory; it stays where it is for as long as it lives."""
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer)) if len(buffer) else 0


@cache
def _process_vm_readv() -> Callable[..., int]:
    """Raises OSError where there is none."""
    try:
        function = ctypes.CDLL(None, use_errno=True).process_vm_readv
    except AttributeError as error:
        raise OSError("this system has no process_vm_readv") from error
    function.restype = ctypes.c_ssize_t
    vectors = ctypes.POINTER(_Vector), ctypes.c_ulong
    function.argtypes = (ctypes.c_int, *vectors, *vectors, ctypes.c_ulong)
    read: Callable[..., int] = function
    return read
