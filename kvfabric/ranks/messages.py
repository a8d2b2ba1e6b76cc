"""What the fabrics of one worker's ranks say to each other: one line of JSON each. Pure.

    every rank → rank 0    Here       once, when its fabric listens
                           Counted    its numbers, when they have changed
    decode
    rank 0 → rank r        Expect, Forget, GiveUp: as the methods of `Fabric`
    rank r → rank 0        Expecting  its answer to Expect
                           Claim      the first frame is here: where does its KV go?
    rank 0 → rank r        Blocks     there; they stay the transfer's until Released
                           NoBlocks   nowhere: the request is gone
    rank r → rank 0        Received, Lost: as the methods of `FrameSink`
                           Released   nothing is copied into those blocks any more: the one answer
                                      to each Blocks
    prefill
    rank 0 → rank r        Ship       the blocks stay the transfer's until Shipped or NotShipped
                           Extend, Commit, Cancel: as the methods of `Shipment`
    rank r → rank 0        Shipped, NotShipped: the end; nothing is copied out of them any more

Block ids mean the same on all ranks. Both ends are the same program, so a line that cannot be read
is a bug.
"""

import json
from dataclasses import asdict, dataclass
from typing import Any, get_args

import kvfabric.errors
from kvfabric.errors import FabricError
from kvfabric.frame import TransferId
from kvfabric.stats import FabricStats, LentSlot
from kvfabric.ticket import KVShard, ReceiveReport, ShipReport, Span, Ticket


@dataclass(frozen=True, slots=True)
class Here:
    shard: KVShard
    stats: FabricStats


@dataclass(frozen=True, slots=True)
class Counted:
    stats: FabricStats
    lent: list[LentSlot]


@dataclass(frozen=True, slots=True)
class Expect:
    ticket: Ticket


@dataclass(frozen=True, slots=True)
class Expecting:
    transfer_id: TransferId


@dataclass(frozen=True, slots=True)
class Forget:
    transfer_id: TransferId


@dataclass(frozen=True, slots=True)
class GiveUp:
    transfer_id: TransferId


@dataclass(frozen=True, slots=True)
class Claim:
    transfer_id: TransferId


@dataclass(frozen=True, slots=True)
class Blocks:
    transfer_id: TransferId
    block_ids: list[int]


@dataclass(frozen=True, slots=True)
class NoBlocks:
    transfer_id: TransferId
    reason: str


@dataclass(frozen=True, slots=True)
class Received:
    transfer_id: TransferId
    report: ReceiveReport


@dataclass(frozen=True, slots=True)
class Lost:
    transfer_id: TransferId
    num_tokens: int
    error: str
    """Name of its class."""
    reason: str


@dataclass(frozen=True, slots=True)
class Released:
    transfer_id: TransferId


@dataclass(frozen=True, slots=True)
class Ship:
    number: int
    """Names it in what follows: a ticket may be shipped, in vain, more than once."""
    ticket: Ticket
    block_ids: list[int]


@dataclass(frozen=True, slots=True)
class Extend:
    number: int
    num_tokens: int
    num_layers: int | None
    block_ids: list[int]
    """Those that were not told yet."""


@dataclass(frozen=True, slots=True)
class Commit:
    """Its payload is rank 0's alone to send: the receiver reads that of the first head."""

    number: int


@dataclass(frozen=True, slots=True)
class Cancel:
    number: int


@dataclass(frozen=True, slots=True)
class Shipped:
    number: int
    report: ShipReport


@dataclass(frozen=True, slots=True)
class NotShipped:
    number: int
    error: str
    reason: str


Message = (
    Here | Counted | Expect | Expecting | Forget | GiveUp | Claim | Blocks | NoBlocks | Received
    | Lost | Released | Ship | Extend | Commit | Cancel | Shipped | NotShipped
)  # fmt: skip

_KINDS: dict[str, type[Message]] = {kind.__name__: kind for kind in get_args(Message)}


def encode(message: Message) -> bytes:
    fields = {"is": type(message).__name__, **asdict(message)}
    return json.dumps(fields, default=_hex, separators=(",", ":")).encode() + b"\n"


def decode(line: bytes) -> Message:
    fields: dict[str, Any] = json.loads(line)
    kind = _KINDS[fields.pop("is")]
    values: dict[str, Any] = {name: _read(kind, name, v) for name, v in fields.items()}
    return kind(**values)


def error_of(name: str, reason: str) -> FabricError:
    """The error that another rank told of."""
    kind = getattr(kvfabric.errors, name, FabricError)
    error: FabricError = kind(reason)
    return error


def _hex(value: object) -> str:
    assert isinstance(value, bytes), value
    return value.hex()


def _read(kind: type[Message], name: str, value: Any) -> object:
    match name:
        case "transfer_id":
            return TransferId(bytes.fromhex(value))
        case "shard":
            return KVShard(**value)
        case "stats":
            return FabricStats(**{**value, "transports": tuple(value["transports"])})
        case "lent":
            return [LentSlot(*slot) for slot in value]
        case "report":
            return _receive_report(value) if kind is Received else _ship_report(value)
        case "ticket":
            return _ticket(value)
        case _:
            return value


def _receive_report(value: dict[str, Any]) -> ReceiveReport:
    return ReceiveReport(**{**value, "install": Span(*value["install"]), "ranks": ()})


def _ship_report(value: dict[str, Any]) -> ShipReport:
    changes = {
        "pack": Span(*value["pack"]),
        "ship": Span(*value["ship"]),
        "transports": tuple(value["transports"]),
        "ranks": (),  # a rank has none
    }
    return ShipReport(**{**value, **changes})


def _ticket(value: dict[str, Any]) -> Ticket:
    changes = {
        "transfer_id": TransferId(bytes.fromhex(value["transfer_id"])),
        "fingerprint": bytes.fromhex(value["fingerprint"]),
        "shards": tuple(KVShard(**shard) for shard in value["shards"]),
        "codecs": tuple(value["codecs"]),
    }
    return Ticket(**{**value, **changes})
