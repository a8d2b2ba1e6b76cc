"""What the tests of the fabric share: KV with known bytes, its two ends, and nodes to put it on."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import kvfabric.node
from kvfabric.config import FabricConfig
from kvfabric.errors import FabricError
from kvfabric.frame import FrameRange
from kvfabric.node import Node
from kvfabric.outgoing import Outgoing
from kvfabric.ticket import KVShape, KVShard, Packed, ReceiveReport, Ticket, new_transfer_id

SHAPE = KVShape(num_layers=4, num_heads=2, head_nbytes=64)  # 1 KiB per token
BLOCK_SIZE = 16
SLOT_NBYTES = 64 << 10  # 64 tokens
FINGERPRINT = b"f" * 32
SECONDS = 10.0

KV = npt.NDArray[np.uint8]  # [layers, 2, tokens, heads, head_nbytes]


def zero_kv(num_tokens: int) -> KV:
    shape = (SHAPE.num_layers, 2, num_tokens, SHAPE.num_heads, SHAPE.head_nbytes)
    return np.zeros(shape, np.uint8)


def random_kv(num_tokens: int, seed: int = 0) -> KV:
    shape = zero_kv(num_tokens).shape
    return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


def part(kv: KV, frame: FrameRange) -> KV:
    return kv[
        frame.first_layer : frame.first_layer + frame.num_layers,
        :,
        frame.first_token : frame.first_token + frame.num_tokens,
        frame.first_head : frame.first_head + frame.num_heads,
    ]


class Source:
    """Packs from KV in memory; can be held up, and can fail."""

    def __init__(self, kv: KV) -> None:
        self.kv = kv
        self.packed: list[FrameRange] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.failure: BaseException | None = None

    async def pack(
        self, frame: FrameRange, out: memoryview, link_nbytes_per_s: float | None
    ) -> Packed:
        await self.gate.wait()
        if self.failure is not None:
            raise self.failure
        out[:] = part(self.kv, frame).tobytes()
        self.packed.append(frame)
        return Packed(len(out))


class Sink:
    """Installs into KV in memory; can be held up, and can fail. Ends once."""

    def __init__(self, num_tokens: int) -> None:
        self.kv = zero_kv(num_tokens)
        self.installed: list[FrameRange] = []
        self._progress = asyncio.Event()
        self.gate = asyncio.Event()
        self.gate.set()
        self.failure: BaseException | None = None
        self.ended: asyncio.Future[tuple[bytes, ReceiveReport] | tuple[FabricError, int]]
        self.ended = asyncio.get_running_loop().create_future()

    async def install(self, frame: FrameRange, payload: memoryview, codec: int) -> None:
        assert not self.ended.done(), "install after the end"
        await self.gate.wait()
        if self.failure is not None:
            raise self.failure
        target = part(self.kv, frame)
        target[...] = np.frombuffer(payload, np.uint8).reshape(target.shape)
        self.installed.append(frame)
        self._progress.set()

    async def has_installed(self, num_frames: int) -> None:
        async with asyncio.timeout(SECONDS):
            while len(self.installed) < num_frames:
                self._progress.clear()
                await self._progress.wait()

    def committed(self, commit: bytes, report: ReceiveReport) -> None:
        self.ended.set_result((commit, report))

    def lost(self, error: FabricError, num_tokens: int) -> None:
        self.ended.set_result((error, num_tokens))

    async def commit(self) -> tuple[bytes, ReceiveReport]:
        first, second = await asyncio.wait_for(asyncio.shield(self.ended), SECONDS)
        assert isinstance(first, bytes), first
        assert isinstance(second, ReceiveReport)
        return first, second

    async def loss(self) -> tuple[FabricError, int]:
        first, second = await asyncio.wait_for(asyncio.shield(self.ended), SECONDS)
        assert isinstance(first, FabricError), first
        assert isinstance(second, int)
        return first, second


def make_config(listen: str, generation: int, **changes: Any) -> FabricConfig:
    settings: dict[str, Any] = {
        "slot_nbytes": SLOT_NBYTES,
        "send_slots": 4,
        "recv_slots": 4,
        "fingerprint": FINGERPRINT,
        **changes,
    }
    return FabricConfig(listen=listen, generation=generation, **settings)


def listen_address(scheme: str) -> str:
    return {"inproc": "inproc://", "ucx": "ucx://127.0.0.1:0"}[scheme]


@asynccontextmanager
async def open_nodes(
    scheme: str, count: int = 2, listen: str | None = None, **changes: Any
) -> AsyncIterator[list[Node]]:
    """Nodes of generations 1, 2, …; after the test everything must be back, before and after
    they are closed."""
    nodes = []
    for generation in range(1, count + 1):
        config = make_config(listen or listen_address(scheme), generation, **changes)
        nodes.append(Node(config, memoryview(bytearray(config.staging_nbytes))))
        await nodes[-1].open()
    try:
        yield nodes
        for node in nodes:
            await idle(node)
    finally:
        for node in nodes:
            await node.close(SECONDS)
    for node in nodes:
        assert node.stats().endpoints == 0
        assert_nothing_held(node)
    if count > 1:  # else other nodes of the test may be open
        await no_tasks_left()


async def no_tasks_left() -> None:
    """Our tasks; ucxx has some of its own. An aborted operation takes a moment to end."""
    ours = [task for task in asyncio.all_tasks() if _is_of_the_fabric(task)]
    if ours:
        _, running = await asyncio.wait(ours, timeout=SECONDS)
        assert not running


def _is_of_the_fabric(task: asyncio.Task[Any]) -> bool:
    code = getattr(task.get_coro(), "cr_code", None)
    return code is not None and Path(code.co_filename).parent == Path(kvfabric.node.__file__).parent


def assert_nothing_held(node: Node) -> None:
    stats = node.stats()
    held = (
        stats.send_slots_used,
        stats.recv_slots_used,
        stats.expected_transfers,
        stats.outgoing_transfers,
    )
    assert held == (0, 0, 0, 0), stats


async def idle(node: Node) -> None:
    """Waits until the node holds nothing for any transfer."""
    async with asyncio.timeout(SECONDS):
        while True:
            stats = node.stats()
            if not (stats.send_slots_used or stats.recv_slots_used or stats.outgoing_transfers):
                break
            await asyncio.sleep(0.005)
    assert_nothing_held(node)


def make_ticket(node: Node, num_tokens: int, first_token: int = 0, **changes: Any) -> Ticket:
    values: dict[str, Any] = {
        "transfer_id": new_transfer_id(),
        "fingerprint": FINGERPRINT,
        "first_token": first_token,
        "num_tokens": num_tokens,
        "block_size": BLOCK_SIZE,
        **changes,
    }
    address = values.pop("address", node.address)
    generation = values.pop("generation", node.config.generation)
    shard = KVShard(address, generation, 0, SHAPE.num_heads)
    return Ticket(shards=(shard,), **values)


def expected(node: Node, num_tokens: int, first_token: int = 0) -> tuple[Ticket, Sink]:
    ticket, sink = make_ticket(node, num_tokens, first_token), Sink(num_tokens)
    node.expect(ticket, SHAPE, sink)
    return ticket, sink


def start_ship(node: Node, ticket: Ticket, source: Source) -> Outgoing:
    outgoing = node.outgoing(ticket, ticket.shards[0], SHAPE, source)
    node.ship(outgoing)
    return outgoing


def ship_all(node: Node, ticket: Ticket, source: Source, commit: bytes = b"commit") -> Outgoing:
    outgoing = start_ship(node, ticket, source)
    outgoing.extend(ticket.num_tokens)
    outgoing.commit(commit)
    return outgoing


async def shipped(outgoing: Outgoing) -> Any:
    return await asyncio.wait_for(asyncio.wrap_future(outgoing.done), SECONDS)


async def ship_error(outgoing: Outgoing) -> FabricError:
    done = asyncio.wrap_future(outgoing.done)
    await asyncio.wait((done,), timeout=SECONDS)
    assert done.done()
    error = done.exception()
    assert isinstance(error, FabricError)
    return error
