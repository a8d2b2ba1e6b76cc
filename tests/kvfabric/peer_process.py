"""A process with a fabric over UCX, for tests that need a real peer: one to kill, stop or restart.

`python -m tests.kvfabric.peer_process GENERATION PORT DEADLINE_S` prints its address, then does
what each JSON line on stdin says and prints one JSON line for each thing that happens. Ends with
stdin.
"""

import asyncio
import hashlib
import json
import os
import sys
import threading
from concurrent.futures import Future
from typing import Any

import numpy as np

from kvfabric.errors import FabricError
from kvfabric.fabric import Fabric
from kvfabric.frame import FrameRange, TransferId
from kvfabric.shipment import Shipment
from kvfabric.ticket import KVShard, Packed, ReceiveReport, ShipReport, Ticket
from tests.kvfabric.rig import (
    BLOCK_SIZE,
    FINGERPRINT,
    KV,
    SECONDS,
    SHAPE,
    make_config,
    part,
    random_kv,
)

_print_lock = threading.Lock()


def tell(**event: Any) -> None:
    with _print_lock:
        print(json.dumps(event), flush=True)


def digest(kv: KV) -> str:
    return hashlib.sha256(kv.tobytes()).hexdigest()


class ProcessSource:
    """Packs random KV of a seed, so that both processes know it."""

    def __init__(self, kv: KV) -> None:
        self._kv = kv

    async def pack(
        self, frame: FrameRange, out: memoryview, link_nbytes_per_s: float | None
    ) -> Packed:
        out[:] = part(self._kv, frame).tobytes()
        return Packed(len(out))


class ProcessSink:
    def __init__(self, transfer_id: str, num_tokens: int, install_s: float) -> None:
        self._id = transfer_id
        self._install_s = install_s
        self._kv = random_kv(num_tokens) * 0

    async def install(self, frame: FrameRange, payload: memoryview, codec: int) -> None:
        await asyncio.sleep(self._install_s)
        target = part(self._kv, frame)
        target[...] = np.frombuffer(payload, np.uint8).reshape(target.shape)
        tell(installed=self._id)

    def committed(self, commit: bytes, report: ReceiveReport) -> None:
        tell(ended=self._id, error=None, digest=digest(self._kv))

    def lost(self, error: FabricError, num_tokens: int) -> None:
        tell(ended=self._id, error=type(error).__name__, num_tokens=num_tokens)


class PeerProcess:
    def __init__(self, generation: int, port: int, deadline_s: float) -> None:
        config = make_config(
            f"ucx://127.0.0.1:{port}",
            generation,
            send_timeout_s=deadline_s,
            transfer_timeout_s=deadline_s,
            connect_timeout_s=deadline_s,
        )
        self.fabric = Fabric(config, memoryview(bytearray(config.staging_nbytes)))
        self._shipping: list[Shipment] = []
        self.fabric.start()

    def do(self, command: dict[str, Any]) -> None:
        match command.pop("do"):
            case "expect":
                self._expect(**command)
            case "ship":
                self._ship(**command)
            case "stats":
                stats = self.fabric.stats()
                tell(
                    slots=stats.send_slots_used + stats.recv_slots_used,
                    transfers=stats.expected_transfers + stats.outgoing_transfers,
                    endpoints=stats.endpoints,
                    transports=stats.transports,
                    errors=stats.errors,
                )

    def _ticket(self, transfer_id: str, address: str, generation: int, num_tokens: int) -> Ticket:
        name = TransferId(bytes.fromhex(transfer_id))
        shard = KVShard(address, generation, 0, SHAPE.num_heads)
        return Ticket(name, (shard,), FINGERPRINT, 0, num_tokens, BLOCK_SIZE)

    def _expect(self, transfer_id: str, num_tokens: int, install_s: float) -> None:
        ticket = self._ticket(transfer_id, self.fabric.address, 0, num_tokens)
        self.fabric.expect(ticket, SHAPE, ProcessSink(transfer_id, num_tokens, install_s))
        tell(expected=transfer_id)

    def _ship(
        self, transfer_id: str, address: str, generation: int, num_tokens: int, computed: int
    ) -> None:
        ticket = self._ticket(transfer_id, address, generation, num_tokens)
        outgoing = self.fabric.ship(ticket, SHAPE, ProcessSource(random_kv(num_tokens)))
        outgoing.extend(computed)
        if computed == num_tokens:
            outgoing.commit(b"")
        self._shipping.append(outgoing)

        def ended(done: Future[ShipReport]) -> None:
            error = done.exception()
            tell(shipped=transfer_id, error=error and type(error).__name__)

        outgoing.done.add_done_callback(ended)


def main() -> None:
    guard = threading.Timer(6 * SECONDS, os._exit, (3,))  # a test that fails must not leave us
    guard.daemon = True
    guard.start()
    peer = PeerProcess(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
    tell(address=peer.fabric.address)
    for line in sys.stdin:
        peer.do(json.loads(line))
    peer.fabric.close()


if __name__ == "__main__":
    main()
