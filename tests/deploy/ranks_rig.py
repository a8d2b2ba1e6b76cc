"""Workers of several ranks in one process: rank 0's fabric, the other ranks' ends of it, a KV pool
for each, and the services' own halves of a handoff around them. No model computes anything."""

import asyncio
import random
import socket
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from queue import SimpleQueue
from threading import Event
from typing import cast

import torch

from decode_server.handoff import Committed, Handoff, Lost
from deploy.rank_handoff import rank_handoff
from engine.config import ModelConfig
from engine.engine import Engine
from engine.kv_cache import KVCache
from engine.kv_codec import Codec
from engine.kv_copier import KVCopier
from engine.kv_lease import KVLease
from engine.request import BlockId, RequestId
from engine.tp.shard import Shard
from kvfabric.fabric import Fabric
from kvfabric.ranks.fabric import RankedFabric
from kvfabric.shipment import Shipment
from kvfabric.ticket import KVShape, ReceiveReport, ShipReport, Ticket, around
from prefill_server.leg import LeaseSource
from tests.kvfabric.rig import FINGERPRINT, SECONDS, make_config
from tests.relay import eventually

NUM_KV_HEADS = 5
NUM_BLOCKS = 40
NUM_TOKENS = 150
HALF = NUM_TOKENS // 2

Verdicts = SimpleQueue[Committed | Lost]

_generations = count(100)


def model_of(folder: Path) -> ModelConfig:
    whole = ModelConfig.from_folder(folder)
    return replace(whole, num_heads=NUM_KV_HEADS, num_kv_heads=NUM_KV_HEADS)


class Lease(KVLease):
    """Tells when it is closed and its last copy is over."""

    def __init__(self, blocks: Sequence[int]) -> None:
        self.drained = Event()
        table = [*map(BlockId, blocks)]
        super().__init__(RequestId("tested"), table, lambda _: self.drained.set())

    def close_and_drain(self) -> None:
        """As the engine does when the request lets go of its blocks."""
        assert self.close() or self.drained.wait(SECONDS), "somebody never left the lease"


class Worker:
    """As many KV pools as ranks. It is the engine of its services, as far as they ask."""

    def __init__(self, model: ModelConfig, num_ranks: int, block_size: int) -> None:
        cpu = torch.device("cpu")
        self.block_size = block_size
        self.fingerprint = FINGERPRINT
        self.kv_shape = model.kv_shape(torch.float32)
        self.kv_codecs = (int(Codec.PLANES),)
        shards = [Shard(rank, num_ranks) for rank in range(num_ranks)]
        self.heads = [shard.kv_heads(model) for shard in shards]
        self.caches = [
            KVCache(shard.part_of(model), NUM_BLOCKS, block_size, torch.float32, cpu)
            for shard in shards
        ]
        self.copiers = [KVCopier(cache) for cache in self.caches]
        self.copier = self.copiers[0]
        self.fabrics: list[Fabric] = []
        """Rank 0's first."""
        self.ends: list[socket.socket] = []
        """Of the other ranks, to shut when they are to die."""
        self.claimed: Future[KVLease] = Future()

    @property
    def fabric(self) -> Fabric:
        return self.fabrics[0]

    def claim(self, request_id: RequestId) -> "Future[KVLease]":
        return self.claimed

    def kv(self, block_table: Sequence[int], num_tokens: int) -> torch.Tensor:
        """[layers, 2, tokens, heads, head_dim] of all ranks together."""
        whole = torch.cat([cache.data for cache in self.caches], dim=4)
        blocks = whole[:, :, list(block_table)]
        return blocks.flatten(2, 3)[:, :, :num_tokens]

    def handoff(self) -> tuple[Handoff, "Verdicts"]:
        verdicts: Verdicts = SimpleQueue()
        engine = cast(Engine, self)
        name = RequestId("tested")
        return Handoff(engine, self.fabric, name, NUM_TOKENS, verdicts.put), verdicts

    async def assert_idle(self) -> None:
        """All ranks, and what rank 0 knows of them."""
        for fabric in self.fabrics:
            await eventually(lambda fabric=fabric: is_idle(fabric), within_s=2)  # type: ignore[misc]


def is_idle(fabric: Fabric) -> bool:
    stats = fabric.stats()
    slots = stats.send_slots_used + stats.recv_slots_used
    return not slots + stats.expected_transfers + stats.outgoing_transfers


@contextmanager
def started(
    model: ModelConfig, num_ranks: int, block_size: int, **config: object
) -> Iterator[Worker]:
    worker = Worker(model, num_ranks, block_size)
    shape = KVShape(*worker.kv_shape)
    with ExitStack() as stack:
        pairs = [socket.socketpair() for _ in worker.caches[1:]]
        for copier in worker.copiers:
            stack.callback(copier.close)
        settings = {"slot_nbytes": 4 << 10, **config}
        fabrics = []
        for rank in range(num_ranks):
            flags = make_config("inproc://", next(_generations), **settings)
            staging = worker.copiers[rank].allocate_staging(flags.staging_nbytes)
            if rank or num_ranks == 1:
                fabrics.append(Fabric(flags, staging))
            else:
                fabrics.append(RankedFabric(flags, staging, [own for own, _ in pairs]))
        for rank, (_, end) in enumerate(pairs, start=1):
            own = shape.shared_with(worker.heads[rank])
            handoff = rank_handoff(fabrics[rank], worker.copiers[rank], own, end, lambda: None)
            stack.enter_context(handoff)
            worker.ends.append(end)
        fabrics[0].start()
        stack.callback(fabrics[0].close)
        worker.fabrics = fabrics
        yield worker


def some_blocks(block_size: int, draw: random.Random) -> list[int]:
    """For all tokens, anywhere in the pool."""
    return draw.sample(range(NUM_BLOCKS), -(-NUM_TOKENS // block_size))


async def next_of(verdicts: "Verdicts") -> Committed | Lost:
    return await asyncio.to_thread(verdicts.get, timeout=SECONDS)


class Relay:
    """A prefill worker with the KV of one prompt in its pools, and a decode worker without."""

    def __init__(self, prefill: Worker, decode: Worker, seed: int) -> None:
        draw = random.Random(seed)
        self.prefill, self.decode = prefill, decode
        for cache in prefill.caches:
            cache.data.copy_(torch.randn_like(cache.data))
        self.there = Lease(some_blocks(decode.block_size, draw))
        self.blocks = some_blocks(prefill.block_size, draw)
        self.here = Lease([])
        self.granted: Future[KVLease] = Future()
        self.granted.set_result(self.here)
        self.handoff, self.verdicts = decode.handoff()

    def ship(self, ticket: Ticket) -> Shipment:
        """As soon as the ticket may be given away."""
        assert self.handoff.welcome is not None
        self.handoff.welcome.result(SECONDS)
        source = LeaseSource(self.prefill.copier, self.granted, ticket.codecs)
        return self.prefill.fabric.ship(ticket, KVShape(*self.prefill.kv_shape), source, source)

    def compute(self, num_tokens: int) -> int:
        """Blocks come as tokens do."""
        num_blocks = -(-num_tokens // self.prefill.block_size)
        table = self.here.block_table
        table.extend(self.blocks[len(table) : num_blocks])  # type: ignore[arg-type]
        return num_tokens

    async def half_way(self, ticket: Ticket) -> Shipment:
        """Every rank of decode has installed something."""
        shipment = self.ship(ticket)
        shipment.extend(self.compute(HALF))
        for fabric in self.decode.fabrics:
            await eventually(lambda f=fabric: f.rank_stats()[0].received_frames > 0)  # type: ignore[misc]
        return shipment

    async def assert_all_back(self) -> None:
        await self.prefill.assert_idle()
        await self.decode.assert_idle()
        await asyncio.to_thread(self.here.close_and_drain)
        await asyncio.to_thread(self.there.close_and_drain)


@asynccontextmanager
async def relay(
    folder: Path, prefill_ranks: int = 2, decode_ranks: int = 2, seed: int = 0
) -> AsyncIterator[Relay]:
    model, sizes = model_of(folder), random.Random(seed)
    with (
        started(model, prefill_ranks, sizes.choice((8, 16, 24))) as prefill,
        started(model, decode_ranks, sizes.choice((8, 16, 24))) as decode,
    ):
        yield Relay(prefill, decode, seed)


async def report_of(shipment: Shipment) -> ShipReport:
    return await asyncio.wait_for(asyncio.wrap_future(shipment.done), SECONDS)


def assert_ranks_are_told(report: ShipReport | ReceiveReport, num_ranks: int) -> None:
    """Each one's part; the whole took what the slowest took, of each stage."""
    if num_ranks == 1:
        assert not report.ranks
        return
    assert len(report.ranks) == num_ranks
    assert sum(its.nbytes for its in report.ranks) == report.nbytes
    stages = ("install",) if isinstance(report, ReceiveReport) else ("pack", "ship")
    for stage in stages:
        spans = [getattr(its, stage) for its in report.ranks]
        assert all(0 < begin < end for begin, end in spans)
        assert getattr(report, stage) == around(spans)
        busy = [getattr(its, f"{stage}_ns") for its in report.ranks]
        assert all(busy)
        assert getattr(report, f"{stage}_ns") == max(busy)
