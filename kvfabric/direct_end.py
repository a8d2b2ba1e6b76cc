"""Whether a new connection may take the short way within a host (kvfabric/direct.py)."""

from collections.abc import Sequence

from kvfabric.direct import Direct
from kvfabric.direct_receiver import DirectReceiver
from kvfabric.direct_sender import DirectSender


def direct_end(transports: Sequence[str], tls: str, *, connects: bool) -> Direct | None:
    """Only where UCX itself goes over shared memory, and may use `cma`, which is this kind of copy
    by UCX's name. `tls`: as its `UCX_TLS`."""
    named = set(tls.removeprefix("^").split(","))
    is_allowed = bool(named & {"all", "sm", "shm", "cma"}) != tls.startswith("^")
    if not is_allowed or (connects and not {"posix", "sysv"} & set(transports)):
        return None
    return DirectSender() if connects else DirectReceiver()
