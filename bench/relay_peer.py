"""The two ends of a handoff without a model: pool, copier and fabric of a worker, and no engine.

`python -m bench.relay_peer` is the sending process: it reads a JSON command a line from stdin, does
it, and answers in a line. What it sends is computed by the clock: chunk after chunk becomes ready,
the last one by groups of layers, as a prefill worker tells of them (engine/layer_groups.py), while
the CPU has nothing to do, as where a card computes.
"""

import argparse
import asyncio
import concurrent.futures
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import torch

from engine.config import ModelConfig
from engine.kv_cache import KVCache
from engine.kv_codec import Codec
from engine.kv_copier import KVCopier
from engine.kv_lease import KVLease
from engine.layer_groups import group_ends
from engine.request import BlockId, RequestId
from kvfabric.config import FabricConfig
from kvfabric.errors import FabricError
from kvfabric.fabric import Fabric
from kvfabric.frame import FrameRange, TransferId
from kvfabric.ticket import KVShape, KVShard, Packed, ReceiveReport, Ticket

FINGERPRINT = b"r" * 32
BLOCK_SIZE = 16
SECONDS = 120.0
RECEIVER, SENDER = 1, 2  # generations


@dataclass(frozen=True, slots=True)
class Shape:
    """Of a model's KV, in bfloat16."""

    num_layers: int
    num_kv_heads: int
    head_dim: int

    @property
    def kv(self) -> KVShape:
        return KVShape(self.num_layers, self.num_kv_heads, 2 * self.head_dim)

    @property
    def token_nbytes(self) -> int:
        return 2 * self.num_layers * self.num_kv_heads * 2 * self.head_dim


@dataclass(frozen=True, slots=True)
class Setting:
    """Of both ends."""

    shape: Shape
    num_tokens: int
    """Room in each pool."""
    slot_nbytes: int = 4 << 20
    checksum: bool = True


class End:
    """A pool with KV all over it, and the way in and out."""

    def __init__(self, setting: Setting, generation: int, host: str) -> None:
        torch.set_num_threads(1)
        num_blocks = -(-setting.num_tokens // BLOCK_SIZE)
        config = cast(ModelConfig, SimpleNamespace(**_fields(setting.shape)))
        kv = KVCache(config, num_blocks, BLOCK_SIZE, torch.bfloat16, torch.device("cpu"))
        generator = torch.Generator().manual_seed(generation)
        kv.data[:, :, :64].normal_(generator=generator)
        for first in range(64, num_blocks, 64):  # each page its own
            end = min(first + 64, num_blocks)
            kv.data[:, :, first:end] = kv.data[:, :, : end - first]
        self.setting = setting
        self.copier = KVCopier(kv)
        ids = [BlockId(i) for i in torch.randperm(num_blocks, generator=generator).tolist()]
        self.lease = KVLease(RequestId("bench"), ids, lambda _: None)
        fabric = FabricConfig(
            listen=f"ucx://{host}:0",
            advertise_host=host,
            fingerprint=FINGERPRINT,
            generation=generation,
            slot_nbytes=setting.slot_nbytes,
            checksum=setting.checksum,
        )
        self.fabric = Fabric(fabric, self.copier.allocate_staging(fabric.staging_nbytes))
        self.fabric.start()

    def close(self) -> None:
        self.fabric.close()
        self.copier.close()


def _fields(shape: Shape) -> dict[str, int]:
    return {name: getattr(shape, name) for name in ("num_layers", "num_kv_heads", "head_dim")}


def ticket_to(
    address: str, transfer_id: bytes, shape: Shape, num_tokens: int, codecs: Sequence[int]
) -> Ticket:
    shard = KVShard(address, RECEIVER, 0, shape.num_kv_heads)
    its = TransferId(transfer_id)
    return Ticket(its, (shard,), FINGERPRINT, 0, num_tokens, BLOCK_SIZE, codecs=tuple(codecs))


class Source:
    """Gathers from the pool; by the codecs given, whatever the link."""

    def __init__(self, end: End, codecs: Sequence[int]) -> None:
        self._end = end
        self._codecs = codecs

    async def pack(
        self, frame: FrameRange, out: memoryview, link_nbytes_per_s: float | None
    ) -> Packed:
        link = 1.0 if self._codecs else link_nbytes_per_s
        packing = self._end.copier.pack(self._end.lease, frame, out, self._codecs, link)
        return Packed(*await asyncio.wrap_future(packing))


class Sink:
    """Scatters into the pool."""

    def __init__(self, end: End) -> None:
        self._end = end
        self.begin_ns = self.end_ns = 0
        self.committed_ns: concurrent.futures.Future[int] = concurrent.futures.Future()

    async def install(self, frame: FrameRange, payload: memoryview, codec: int) -> None:
        self.begin_ns = self.begin_ns or time.monotonic_ns()
        scatter = self._end.copier.scatter(self._end.lease, frame, payload, codec=Codec(codec))
        await asyncio.wrap_future(scatter)
        self.end_ns = time.monotonic_ns()

    def committed(self, commit: bytes, report: ReceiveReport) -> None:
        self.committed_ns.set_result(time.monotonic_ns())

    def lost(self, error: FabricError, num_tokens: int) -> None:
        self.committed_ns.set_exception(error)


class SendingProcess:
    """As its parent sees it. `prefix`: what starts it elsewhere, such as in a network namespace."""

    def __init__(self, setting: Setting, host: str, prefix: Sequence[str] = ()) -> None:
        shape = setting.shape
        numbers = [shape.num_layers, shape.num_kv_heads, shape.head_dim, setting.num_tokens]
        numbers += [setting.slot_nbytes, int(setting.checksum)]
        command = [*prefix, sys.executable, "-m", "bench.relay_peer", host, *map(str, numbers)]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)

    def tell(self, command: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        told: dict[str, Any] = json.loads(self._process.stdout.readline())
        return told

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=SECONDS)


def relay(end: End, command: dict[str, Any]) -> dict[str, Any]:
    """Ships as many prompts at once as there are transfers; times by time.monotonic_ns."""
    shape, num_tokens = end.setting.shape, command["num_tokens"]
    began_ns = time.monotonic_ns()
    shipments = []
    for transfer_id in command["transfers"]:
        name = bytes.fromhex(transfer_id)
        ticket = ticket_to(command["address"], name, shape, num_tokens, command["codecs"])
        shipments.append(end.fabric.ship(ticket, shape.kv, Source(end, command["codecs"])))
    _compute(shipments, shape, num_tokens, command["chunk"], command["chunk_s"])
    computed_ns = time.monotonic_ns()
    for shipment in shipments:
        shipment.commit(b"token 0")
    reports = [shipment.done.result(SECONDS) for shipment in shipments]
    return {
        "began_ns": began_ns,
        "computed_ns": computed_ns,
        "nbytes": sum(report.nbytes for report in reports),
        "frames": sum(report.frames for report in reports),
        "pack": reports[0].pack,
        "pack_ns": reports[0].pack_ns,
        "ship": reports[0].ship,
        "transports": reports[0].transports,
        "codec": Codec(reports[0].codec).name.lower(),
    }


def _compute(
    shipments: Sequence[Any], shape: Shape, num_tokens: int, chunk: int, chunk_s: float
) -> None:
    """All of it is there at once if a chunk takes no time."""
    for first in range(0, num_tokens, chunk):
        end = min(first + chunk, num_tokens)
        took_s, at = chunk_s * (end - first) / chunk, 0
        is_last = end == num_tokens
        ends = group_ends(shape.num_layers, end - first) if is_last else (shape.num_layers,)
        for num_layers in ends if chunk_s else (shape.num_layers,):
            time.sleep(took_s * (num_layers - at) / shape.num_layers)
            at = num_layers
            for shipment in shipments:
                shipment.extend(end, num_layers if is_last else None)


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.relay_peer")
    parser.add_argument("host")
    parser.add_argument("numbers", type=int, nargs=6)
    args = parser.parse_args()
    layers, heads, head_dim, num_tokens, slot_nbytes, checksum = args.numbers
    setting = Setting(Shape(layers, heads, head_dim), num_tokens, slot_nbytes, bool(checksum))
    end = End(setting, SENDER, args.host)
    for line in sys.stdin:
        print(json.dumps(relay(end, json.loads(line))), flush=True)
    end.close()


if __name__ == "__main__":
    main()
