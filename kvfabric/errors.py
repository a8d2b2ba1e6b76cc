"""Everything that can go wrong on the fabric.

    FabricError
    ├── PeerLost              the connection broke, or the peer is another process now
    ├── HandshakeRefused      the peer speaks, but not with us: fingerprint, generation, version
    ├── DeadlineExceeded      an await that leaves the process took too long
    ├── TransferAborted       the peer sent ABORT, or the transfer was cancelled here
    ├── BadFrame              a frame that must not be installed
    │   └── ChecksumMismatch
    ├── PackFailed            the source could not fill a frame (its cause says why)
    ├── InstallFailed         the sink could not take a frame (its cause says why)
    └── FabricClosed          the fabric of this process is closed, or is closing

All of them cost a transfer, never the process. The services translate them, once.
"""


class FabricError(Exception):
    """Base of every error of the fabric."""


class PeerLost(FabricError):
    """The connection broke, or another process answers at that address."""


class HandshakeRefused(FabricError):
    """The peer refused, or was refused: fingerprint, generation or wire version differ."""


class DeadlineExceeded(FabricError):
    """An await that leaves the process took longer than its deadline."""


class TransferAborted(FabricError):
    """The peer knows no such transfer or gave it up, or it was cancelled on this side."""


class BadFrame(FabricError):
    """A frame that is malformed, out of range, of the wrong size, or overlaps another one."""


class ChecksumMismatch(BadFrame):
    """The payload is not what was sent."""


class PackFailed(FabricError):
    """The `FrameSource` raised, or was committed before all its tokens were computed."""


class InstallFailed(FabricError):
    """The `FrameSink` raised."""


class FabricClosed(FabricError):
    """This process's fabric is closed, or is closing."""
