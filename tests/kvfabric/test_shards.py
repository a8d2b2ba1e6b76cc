"""Senders and receivers of several processes each: every head goes where it belongs, and nowhere
else, by as many connections as there are pairs with heads in common."""

import asyncio
from concurrent.futures import Future
from itertools import count, pairwise, product
from random import Random

import numpy as np
import pytest

from kvfabric.errors import FabricError, PackFailed, TransferAborted
from kvfabric.frame import RAW
from kvfabric.node import Node
from kvfabric.outgoing import Outgoing
from kvfabric.shipment import Shipment, Shipments
from kvfabric.ticket import KVShape, KVShard, ShipReport, Span, Ticket, new_transfer_id
from tests.kvfabric.rig import (
    FINGERPRINT,
    KV,
    SECONDS,
    Sink,
    Source,
    assert_nothing_held,
    idle,
    open_nodes,
)

MODEL = KVShape(num_layers=3, num_heads=5, head_nbytes=32)


def random_kv(num_tokens: int, seed: int) -> KV:
    shape = (MODEL.num_layers, 2, num_tokens, MODEL.num_heads, MODEL.head_nbytes)
    return np.random.default_rng(seed).integers(1, 256, shape, np.uint8)


def cut(parts: int) -> list[range]:
    """The model's heads, evenly to within one."""
    bounds = [MODEL.num_heads * i // parts for i in range(parts + 1)]
    return [range(a, b) for a, b in pairwise(bounds)]


def ticket_to(nodes: list[Node], num_tokens: int, block_size: int, first_token: int = 0) -> Ticket:
    shards = tuple(
        KVShard(node.address, node.config.generation, heads.start, len(heads))
        for node, heads in zip(nodes, cut(len(nodes)), strict=True)
    )
    name = new_transfer_id()
    return Ticket(name, shards, FINGERPRINT, first_token, num_tokens, block_size)


def expect(nodes: list[Node], ticket: Ticket, kv: KV) -> list[Sink]:
    sinks = []
    for node, shard in zip(nodes, ticket.shards, strict=True):
        sink = Sink(1)
        sink.kv = np.zeros_like(kv)
        node.expect(ticket, MODEL.shared_with(shard.heads), sink)
        sinks.append(sink)
    return sinks


def ship(nodes: list[Node], ticket: Ticket, sources: list[Source]) -> Shipment:
    """As the senders' first process sees it: one handle for all."""
    parts: list[tuple[Node, Outgoing]] = []
    for node, heads, source in zip(nodes, cut(len(nodes)), sources, strict=True):
        own = MODEL.shared_with(heads)
        for peer in ticket.shards:
            if own.shared_with(peer.heads).num_heads:
                parts.append((node, node.outgoing(ticket, peer, own, source)))
    shipment = Shipments([part for _, part in parts])
    for node, part in parts:
        node.ship(part)
    return shipment


async def report_of(shipment: Shipment) -> ShipReport:
    return await asyncio.wait_for(asyncio.wrap_future(shipment.done), SECONDS)


@pytest.mark.parametrize(("num_senders", "num_receivers"), list(product((1, 2, 3), repeat=2)))
async def test_every_byte_in_its_place(num_senders: int, num_receivers: int) -> None:
    draw = Random(10 * num_senders + num_receivers)
    async with open_nodes("inproc", num_senders + num_receivers, slot_nbytes=4 << 10) as nodes:
        senders, receivers = nodes[:num_senders], nodes[num_senders:]
        for seed, block_size in enumerate((1, 16, 24, 64)):
            num_tokens, first = draw.randrange(60, 200), draw.choice((0, 1, 2)) * block_size // 2
            kv = random_kv(num_tokens, seed)
            ticket = ticket_to(receivers, num_tokens, block_size, first)
            sinks = expect(receivers, ticket, kv)
            sources = [Source(kv) for _ in senders]
            shipment = ship(senders, ticket, sources)
            for computed in range(first, num_tokens, 37):
                shipment.extend(computed)
                await asyncio.sleep(0)
            shipment.extend(num_tokens)
            shipment.commit(b"token 0")
            report = await report_of(shipment)
            assert report.nbytes == kv[:, :, first:].nbytes
            for sink, shard in zip(sinks, ticket.shards, strict=True):
                payload, received = await sink.commit()
                assert payload == b"token 0"
                mine = np.zeros_like(kv)
                there = slice(shard.first_head, shard.first_head + shard.num_heads)
                mine[:, :, first:, there] = kv[:, :, first:, there]
                assert np.array_equal(sink.kv, mine)
                assert received.nbytes == kv[:, :, first:, there].nbytes
            for source, heads in zip(sources, cut(num_senders), strict=True):
                assert all(set(frame.heads) <= set(heads) for frame in source.packed)
        pairs = sum(bool(set(a) & set(b)) for a, b in product(cut(num_senders), cut(num_receivers)))
        assert sum(node.stats().endpoints for node in senders) == pairs


async def test_a_source_that_fails_ends_all_parts_at_all_receivers() -> None:
    async with open_nodes("inproc", 4) as nodes:
        kv = random_kv(600, 0)
        ticket = ticket_to(nodes[2:], 600, 16)
        sinks = expect(nodes[2:], ticket, kv)
        good, bad = Source(kv), Source(kv)
        shipment = ship(nodes[:2], ticket, [good, bad])
        shipment.extend(320)
        for sink in sinks:
            await sink.has_installed(2)
        bad.failure = ValueError("no")
        shipment.extend(600)
        shipment.commit(b"")
        with pytest.raises(PackFailed, match="no"):
            await report_of(shipment)
        for sink in sinks:
            error, num_tokens = await sink.loss()
            assert isinstance(error, FabricError)
            assert num_tokens >= 0
        for node in nodes:
            await idle(node)
            assert_nothing_held(node)


async def test_a_receiver_that_forgets_ends_all_parts() -> None:
    async with open_nodes("inproc", 4) as nodes:
        kv = random_kv(600, 1)
        ticket = ticket_to(nodes[2:], 600, 16)
        sinks = expect(nodes[2:], ticket, kv)
        shipment = ship(nodes[:2], ticket, [Source(kv), Source(kv)])
        shipment.extend(320)
        await sinks[1].has_installed(1)
        nodes[3].forget(ticket.transfer_id)
        shipment.extend(600)
        with pytest.raises(TransferAborted):
            await report_of(shipment)
        await sinks[0].loss()
        assert not sinks[1].ended.done()


class Part(Shipment):
    """Notes what it is told; `end` is for the test."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[object] = []

    def extend(self, num_tokens: int, num_layers: int | None = None) -> None:
        self.told.append(num_tokens)

    def commit(self, payload: bytes) -> None:
        self.told.append(payload)

    def cancel(self) -> None:
        self.told.append("cancel")


def test_shipments_are_one_handle_and_one_report() -> None:
    parts = [Part(), Part(), Part()]
    together = Shipments(parts)
    together.extend(7)
    together.commit(b"x")
    numbers = count(1)
    for part in parts:
        assert not together.done.done()
        assert part.told == [7, b"x"]
        i = next(numbers)
        part.done.set_result(report(i))
    assert together.done.result(0) == ShipReport(
        pack_ns=6,
        ship_ns=30,
        nbytes=600,
        frames=6,
        pack=Span(5, 31),
        ship=Span(30, 59),
        transports=("posix", "tcp"),
        codec=RAW,
        offers=6,
    )


def report(i: int) -> ShipReport:
    """The i-th; the third has sent nothing but COMMIT, so it has packed nothing."""
    return ShipReport(
        pack_ns=i,
        ship_ns=10 * i,
        nbytes=100 * i,
        frames=i,
        pack=Span(5 * i, 5 * i + 21) if i < 3 else Span(0, 0),
        ship=Span(60 - 10 * i, 60 - i),
        transports=("posix", "tcp") if i == 1 else ("tcp",),
        codec=RAW,
        offers=i,
    )


def test_the_first_failure_counts_and_all_are_waited_for() -> None:
    parts = [Part(), Part(), Part()]
    together = Shipments(parts)
    parts[1].done.set_exception(PackFailed("first"))
    assert all(part.told == ["cancel"] for part in parts)
    parts[0].done.set_exception(TransferAborted("cancelled here"))
    assert not together.done.done()
    parts[2].done.set_result(report(1))
    done: Future[ShipReport] = together.done
    assert isinstance(done.exception(0), PackFailed)
