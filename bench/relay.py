"""Relays between two processes that have pools of KV and no model; what each stage took."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bench.relay_peer import RECEIVER, SECONDS, End, SendingProcess, Setting, Sink, ticket_to
from kvfabric.ticket import new_transfer_id

_WARM_UP_NBYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Relayed:
    """One relay; milliseconds."""

    total: float
    """First told to ship → all of it committed."""
    exposed: float
    """Last layer computed → committed."""
    pack: float
    """Busy, added up over the frames; may overlap the others, as the next two may."""
    ship: float
    """First frame handed to the network → last slot free again."""
    install: float
    """First frame → last one installed, what came between included."""
    nbytes: int
    """That crossed the network."""
    frames: int
    transports: tuple[str, ...]


class Pair:
    """The receiving end, in this process, and the sending one."""

    def __init__(
        self,
        setting: Setting,
        hosts: tuple[str, str] = ("127.0.0.1", "127.0.0.1"),
        prefix: Sequence[str] = (),
    ) -> None:
        """`hosts` of the receiver and of the sender."""
        self._shape = setting.shape
        self._end = End(setting, RECEIVER, hosts[0])
        self._peer = SendingProcess(setting, hosts[1], prefix)
        for _ in range(2):  # queues of shared memory are of fresh pages until once around
            self.relay(min(setting.num_tokens, _WARM_UP_NBYTES // setting.shape.token_nbytes))

    def relay(
        self,
        num_tokens: int,
        *,
        count: int = 1,
        codecs: Sequence[int] = (),
        chunk: int = 512,
        chunk_s: float = 0.0,
    ) -> Relayed:
        """`count` prompts at once, into the same blocks. `chunk_s` 0: all is there already."""
        sinks, transfers, fabric = [], [], self._end.fabric
        for _ in range(count):
            transfer_id = new_transfer_id()
            ticket = ticket_to(fabric.address, transfer_id, self._shape, num_tokens, codecs)
            sinks.append(Sink(self._end))
            transfers.append(transfer_id.hex())
            fabric.expect(ticket, self._shape.kv, sinks[-1])
        self._peer.tell(
            {
                "transfers": transfers,
                "address": fabric.address,
                "num_tokens": num_tokens,
                "codecs": list(codecs),
                "chunk": chunk,
                "chunk_s": chunk_s,
            }
        )
        committed_ns = max(sink.committed_ns.result(SECONDS) for sink in sinks)
        return _relayed(self._peer.answer(), sinks[0], committed_ns)

    def close(self) -> None:
        self._peer.close()
        self._end.close()


def _relayed(told: dict[str, Any], sink: Sink, committed_ns: int) -> Relayed:
    return Relayed(
        total=(committed_ns - told["began_ns"]) / 1e6,
        exposed=(committed_ns - told["computed_ns"]) / 1e6,
        pack=told["pack_ns"] / 1e6,
        ship=(told["ship"][1] - told["ship"][0]) / 1e6,
        install=(sink.end_ns - sink.begin_ns) / 1e6,
        nbytes=told["nbytes"],
        frames=told["frames"],
        transports=tuple(told["transports"]),
    )


def median(relays: Sequence[Relayed], name: str) -> float:
    value: float = statistics.median(getattr(one, name) for one in relays)
    return value
