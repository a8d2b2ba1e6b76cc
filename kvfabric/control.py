"""Control messages: everything that is said on a connection beside frames.

All have one fixed size, so that one small receive can always be posted. They carry no slot.

    sender → receiver   HELLO    who I am, and whom I want to reach
                        OFFER    so many more frames will come: post that many receives
                        ABORT    this transfer is given up here
    receiver → sender   WELCOME  or REFUSED, in answer to HELLO
                        ABORT    this transfer is unknown, taken or lost here: stop sending it
                        RECALL   what is on offer and has nothing to carry is to be voided now
                        PACED    from here on frames may be kept waiting on purpose, or no longer
"""

import struct
from dataclasses import dataclass
from enum import IntEnum

from kvfabric.direct import INVITATION_NBYTES
from kvfabric.errors import BadFrame
from kvfabric.frame import WIRE_VERSION, TransferId

_MAGIC = b"BTNC"
FACTS_NBYTES = 168
# magic, version, kind, code, a, b, 32 bytes, invitation, text
_MESSAGE = struct.Struct(f"<4sHBBQQ32s{INVITATION_NBYTES}s{FACTS_NBYTES}s")
CONTROL_NBYTES = _MESSAGE.size
FINGERPRINT_NBYTES = 32


class RefusalReason(IntEnum):
    WIRE_VERSION = 1
    FINGERPRINT = 2
    GENERATION = 3


class AbortReason(IntEnum):
    UNKNOWN = 1
    """No such transfer is expected: finished, forgotten, or never was."""

    TAKEN = 2
    """Another connection is sending it."""

    LOST = 3
    """A frame of it was bad, or could not be installed, or the deadline passed."""

    CANCELLED = 4
    """The sender gave it up."""


@dataclass(frozen=True, slots=True)
class Hello:
    fingerprint: bytes
    generation: int
    expected_generation: int
    version: int = WIRE_VERSION
    facts: str = ""
    """What the fingerprint is of, for people; see kvfabric/facts.py. Cut to `FACTS_NBYTES`."""
    invitation: bytes = b""
    """To read frames directly, see kvfabric/direct.py; empty: there is none."""


@dataclass(frozen=True, slots=True)
class Welcome:
    fingerprint: bytes
    generation: int
    facts: str = ""
    accepts: bool = False
    """The invitation of HELLO."""


@dataclass(frozen=True, slots=True)
class Refused:
    reason: RefusalReason
    facts: str = ""
    """Of who refuses."""


@dataclass(frozen=True, slots=True)
class Offer:
    num_frames: int


@dataclass(frozen=True, slots=True)
class Abort:
    transfer_id: TransferId
    reason: AbortReason


@dataclass(frozen=True, slots=True)
class Paced:
    is_on: bool


@dataclass(frozen=True, slots=True)
class Recall:
    """See kvfabric/standing.py."""


Control = Hello | Welcome | Refused | Offer | Abort | Paced | Recall

_HELLO, _WELCOME, _REFUSED, _OFFER, _ABORT, _PACED, _RECALL = range(1, 8)


def encode_control(message: Control) -> bytes:
    match message:
        case Hello(fingerprint, generation, expected, version, facts, invitation):
            return _pack(
                _HELLO, a=generation, b=expected, data=fingerprint, version=version, facts=facts,
                invitation=invitation,
            )  # fmt: skip
        case Welcome(fingerprint, generation, facts, accepts):
            return _pack(_WELCOME, code=accepts, a=generation, data=fingerprint, facts=facts)
        case Refused(reason, facts):
            return _pack(_REFUSED, code=reason, facts=facts)
        case Offer(num_frames):
            return _pack(_OFFER, a=num_frames)
        case Abort(transfer_id, reason):
            return _pack(_ABORT, code=reason, data=transfer_id)
        case Paced(is_on):
            return _pack(_PACED, code=is_on)
        case Recall():
            return _pack(_RECALL)


def decode_control(message: bytes | bytearray) -> Control:
    """Raises `BadFrame` for what no peer of ours says. A HELLO of another version is parsed."""
    magic, version, kind, code, a, b, data, invitation, text = _MESSAGE.unpack(message)
    if magic != _MAGIC or (version != WIRE_VERSION and kind != _HELLO):
        raise BadFrame(f"magic {magic!r} and version {version} are not ours")
    try:
        match kind:
            case 1:
                invited = invitation if any(invitation) else b""
                return Hello(data, a, b, version, _read_text(text), invited)
            case 2 if code in (0, 1):
                return Welcome(data, a, _read_text(text), code == 1)
            case 3:
                return Refused(RefusalReason(code), _read_text(text))
            case 4:
                return Offer(a)
            case 5:
                return Abort(TransferId(data[:16]), AbortReason(code))
            case 6 if code in (0, 1):
                return Paced(code == 1)
            case 7:
                return Recall()
    except ValueError as error:
        raise BadFrame(f"unknown code {code} in control message {kind}") from error
    raise BadFrame(f"unknown control message {kind}")


def _pack(
    kind: int,
    *,
    code: int = 0,
    a: int = 0,
    b: int = 0,
    data: bytes = b"",
    version: int = WIRE_VERSION,
    facts: str = "",
    invitation: bytes = b"",
) -> bytes:
    text = facts.encode()[:FACTS_NBYTES]
    return _MESSAGE.pack(_MAGIC, version, kind, code, a, b, data, invitation, text)


def _read_text(text: bytes) -> str:
    return text.rstrip(bytes(1)).decode(errors="ignore")
