"""The two ends of the fabric benchmark: the receiving process, and the sending ones it starts.

`python -m bench.fabric_peer --slot-nbytes N --checksum 0|1 --host HOST` is a sender: it reads one
JSON command a line from stdin, does it, and answers with the nanoseconds from its first message
handed to the network to the end of its last: of the fabric that is the stage `ship`. Bare ucxx runs
on the loop of each process's fabric, because UCX serves one loop per process; so both have the same
threads around them.
"""

import argparse
import asyncio
import concurrent.futures
import json
import os
import struct
import subprocess
import sys
import time
from collections import deque
from typing import Any

import numpy as np

from bench.limited_link import LOOPBACK, Link
from kvfabric.config import FabricConfig
from kvfabric.errors import FabricError
from kvfabric.fabric import Fabric
from kvfabric.frame import FrameRange, TransferId
from kvfabric.ticket import KVShape, KVShard, Packed, ReceiveReport, Ticket, new_transfer_id

FINGERPRINT = b"f" * 32
SECONDS = 60.0
WINDOW = 4
_START = struct.Struct("<Q")


def open_fabric(slot_nbytes: int, *, host: str, generation: int, checksum: bool) -> Fabric:
    config = FabricConfig(
        listen=f"ucx://{host}:0",
        fingerprint=FINGERPRINT,
        generation=generation,
        slot_nbytes=slot_nbytes,
        checksum=checksum,
    )
    staging = np.ones(config.staging_nbytes, np.uint8)  # touches every page
    fabric = Fabric(config, staging.data)
    fabric.start()
    return fabric


def shape_of(nbytes: int) -> tuple[KVShape, int]:
    """KV of 32 layers and 2 KiB per token and layer that adds up to `nbytes`, and its tokens."""
    assert nbytes % (64 << 10) == 0
    return KVShape(num_layers=32, num_heads=2, head_nbytes=512), nbytes // (64 << 10)


def ticket_to(transfer_id: TransferId, address: str, shape: KVShape, num_tokens: int) -> Ticket:
    """Of the receiving process, which is generation 1."""
    shard = KVShard(address, 1, 0, shape.num_heads)
    return Ticket(transfer_id, (shard,), FINGERPRINT, 0, num_tokens, 16)


class _Sink:
    """Installs nothing; knows when all of it was there."""

    def __init__(self) -> None:
        self.took_ns: concurrent.futures.Future[int] = concurrent.futures.Future()

    async def install(self, frame: FrameRange, payload: memoryview, codec: int) -> None:
        pass

    def committed(self, commit: bytes, report: ReceiveReport) -> None:
        (started,) = _START.unpack(commit)
        self.took_ns.set_result(time.monotonic_ns() - started)

    def lost(self, error: FabricError, num_tokens: int) -> None:
        self.took_ns.set_exception(error)


class _Source:
    async def pack(
        self, frame: FrameRange, out: memoryview, link_nbytes_per_s: float | None
    ) -> Packed:
        return Packed(len(out))


class Peer:
    """A sending process, as its parent sees it."""

    def __init__(
        self, slot_nbytes: int, *, checksum: bool, tls: str | None = None, link: Link = LOOPBACK
    ) -> None:
        """`tls`: what UCX, and the fabric, may go over, if not as here."""
        command = [*link.prefix, sys.executable, "-m", "bench.fabric_peer", "--host", link.there]
        command += ["--slot-nbytes", str(slot_nbytes), "--checksum", str(int(checksum))]
        pipe = subprocess.PIPE
        environment = {**os.environ, **({} if tls is None else {"UCX_TLS": tls})}
        self._process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, text=True, env=environment
        )

    def tell(self, command: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()

    def answer(self) -> int:
        assert self._process.stdout is not None
        return int(self._process.stdout.readline())

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=SECONDS)


class Receiving:
    """The receiving process: a fabric, and a listener for bare ucxx beside it."""

    def __init__(self, slot_nbytes: int, host: str = LOOPBACK.here) -> None:
        self._host = host
        self._slot_nbytes = slot_nbytes
        self._fabric = open_fabric(slot_nbytes, host=host, generation=1, checksum=True)
        self._bare = _BareReceiver(slot_nbytes)
        self._fabric.call(self._bare.listen()).result(SECONDS)

    @property
    def transports(self) -> tuple[str, ...]:
        return self._fabric.stats().transports

    def one(self, variant: str, peer: Peer, nbytes: int) -> tuple[int, int]:
        """Nanoseconds of `ship` alone, and from the sender's decision to the receiver's end."""
        if variant == "bare":
            bare = {"do": "bare", "host": self._host, "port": self._bare.port, "nbytes": nbytes}
            peer.tell(bare)
            took_ns = self._fabric.call(self._bare.receive(nbytes)).result(SECONDS)
            return peer.answer(), took_ns
        shape, num_tokens = shape_of(nbytes)
        ticket = ticket_to(new_transfer_id(), self._fabric.address, shape, num_tokens)
        sink = _Sink()
        self._fabric.expect(ticket, shape, sink)
        peer.tell(
            {
                "do": "fabric",
                "transfer_id": ticket.transfer_id.hex(),
                "address": self._fabric.address,
                "nbytes": nbytes,
            }
        )
        took_ns = sink.took_ns.result(SECONDS)
        return peer.answer(), took_ns

    def close(self) -> None:
        self._fabric.call(self._bare.close()).result(SECONDS)
        self._fabric.close()


class _BareReceiver:
    """Bare ucxx: receives of a slot's size into a ring of buffers, a window of them posted."""

    def __init__(self, slot_nbytes: int) -> None:
        self._slot_nbytes = slot_nbytes
        self._ring = [np.ones(slot_nbytes, np.uint8) for _ in range(WINDOW)]
        self._endpoint: Any = None
        self._connected = asyncio.Event()

    async def listen(self) -> None:
        import ucxx

        async def on_client(endpoint: Any) -> None:
            self._endpoint = endpoint
            self._connected.set()

        self._listener = ucxx.create_listener(on_client)
        self.port: int = self._listener.port

    async def receive(self, nbytes: int) -> int:
        await self._connected.wait()
        await windowed(self._endpoint.recv, self._ring, nbytes)
        ended = time.monotonic_ns()
        start = bytearray(_START.size)
        await self._endpoint.recv(start)
        (started,) = _START.unpack(start)
        return ended - int(started)

    async def close(self) -> None:
        if self._endpoint is not None:
            self._endpoint.abort()
        self._endpoint = None
        self._listener.close()


class _BareSender:
    def __init__(self, slot_nbytes: int) -> None:
        self._ring = [np.ones(slot_nbytes, np.uint8) for _ in range(WINDOW)]
        self._endpoint: Any = None

    async def send(self, host: str, port: int, nbytes: int, decided_ns: int) -> int:
        import ucxx

        if self._endpoint is None:
            self._endpoint = await ucxx.create_endpoint(host, port)
        began_ns = time.monotonic_ns()
        await windowed(self._endpoint.send, self._ring, nbytes)
        ended_ns = time.monotonic_ns()
        await self._endpoint.send(_START.pack(decided_ns))
        return ended_ns - began_ns

    async def close(self) -> None:
        if self._endpoint is not None:
            self._endpoint.abort()
        self._endpoint = None


async def windowed(operation: Any, ring: list[Any], nbytes: int) -> None:
    """Sends or receives `nbytes` in messages of at most a buffer, as many at once as buffers."""
    under_way: deque[asyncio.Future[None]] = deque()
    for i, first in enumerate(range(0, nbytes, len(ring[0]))):
        if len(under_way) == len(ring):
            await under_way.popleft()
        buffer = ring[i % len(ring)][: nbytes - first]
        under_way.append(asyncio.ensure_future(operation(buffer)))
    for one in under_way:
        await one


def ship(fabric: Fabric, command: dict[str, Any]) -> int:
    shape, num_tokens = shape_of(command["nbytes"])
    transfer_id = TransferId(bytes.fromhex(command["transfer_id"]))
    ticket = ticket_to(transfer_id, command["address"], shape, num_tokens)
    started = time.monotonic_ns()
    outgoing = fabric.ship(ticket, shape, _Source())
    outgoing.extend(num_tokens)
    outgoing.commit(_START.pack(started))
    return outgoing.done.result(SECONDS).ship_ns


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.fabric_peer")
    parser.add_argument("--slot-nbytes", type=int, required=True)
    parser.add_argument("--checksum", type=int, required=True)
    parser.add_argument("--host", required=True)
    args = parser.parse_args()
    fabric = open_fabric(
        args.slot_nbytes,
        host=args.host,
        generation=os.getpid(),
        checksum=bool(args.checksum),
    )
    bare = _BareSender(args.slot_nbytes)
    for line in sys.stdin:
        command = json.loads(line)
        if command["do"] == "bare":
            where, now_ns = (command["host"], command["port"]), time.monotonic_ns()
            sending = bare.send(*where, command["nbytes"], now_ns)
            print(fabric.call(sending).result(SECONDS), flush=True)
        else:
            print(ship(fabric, command), flush=True)
    fabric.call(bare.close()).result(SECONDS)
    fabric.close()


if __name__ == "__main__":
    main()
