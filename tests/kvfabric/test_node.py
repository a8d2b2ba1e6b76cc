"""Transfers between whole nodes of ours."""

import asyncio
import time

import numpy as np
import pytest

from kvfabric.errors import (
    TransferAborted,
)
from kvfabric.ticket import Packed
from tests.kvfabric.rig import (
    Source,
    expected,
    open_nodes,
    random_kv,
    ship_all,
    ship_error,
    shipped,
    start_ship,
)

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.usefixtures("ucx_stays_up")]


async def test_many_frames_arrive_byte_for_byte(scheme: str) -> None:
    async with open_nodes(scheme) as (prefill, decode):
        kv = random_kv(1500)
        ticket, sink = expected(decode, 1500, first_token=32)
        outgoing = start_ship(prefill, ticket, Source(kv))
        for computed in (100, 101, 700, 1500):
            outgoing.extend(computed)
            await asyncio.sleep(0.002)
        outgoing.commit(b"token 0")
        sent = await shipped(outgoing)
        payload, report = await sink.commit()
        assert payload == b"token 0"
        assert np.array_equal(sink.kv[:, :, 32:], kv[:, :, 32:])
        assert not sink.kv[:, :, :32].any()
        assert sent.nbytes == report.nbytes == (1500 - 32) * 1024
        assert sent.frames == report.frames == len(sink.installed)
        boundaries = {f.first_token + f.num_tokens for f in sink.installed} - {1500}
        assert all(token % 16 == 0 for token in boundaries)
        assert prefill.stats().sent_nbytes == decode.stats().received_nbytes == sent.nbytes
        assert prefill.stats().endpoints == decode.stats().endpoints == 1


async def test_many_transfers_share_a_connection_both_ways(scheme: str) -> None:
    async with open_nodes(scheme, send_slots=2, recv_slots=2) as nodes:
        running = []
        for i in range(10):
            there = nodes[i % 2]
            kv = random_kv(300 + i, seed=i)
            ticket, sink = expected(there, 300 + i)
            running.append((kv, sink, ship_all(nodes[1 - i % 2], ticket, Source(kv))))
        for kv, sink, outgoing in running:
            await shipped(outgoing)
            await sink.commit()
            assert np.array_equal(sink.kv, kv)


async def test_two_fabrics_with_one_slot_each_do_not_deadlock(scheme: str) -> None:
    async with open_nodes(scheme, send_slots=1, recv_slots=1) as nodes:
        pairs = []
        for i in range(6):
            kv = random_kv(400, seed=i)
            ticket, sink = expected(nodes[i % 2], 400)
            pairs.append((kv, sink, ship_all(nodes[1 - i % 2], ticket, Source(kv))))
        for kv, sink, outgoing in pairs:
            await shipped(outgoing)
            await sink.commit()
            assert np.array_equal(sink.kv, kv)


async def test_transfers_take_turns() -> None:
    async with open_nodes("inproc", send_slots=1) as (prefill, decode):
        order: list[int] = []

        class Noted(Source):
            def __init__(self, name: int) -> None:
                super().__init__(random_kv(512))
                self.name = name

            async def pack(
                self, frame: object, out: memoryview, link_nbytes_per_s: float | None
            ) -> Packed:
                order.append(self.name)
                return Packed(len(out))

        started = []
        for name in range(3):
            ticket, sink = expected(decode, 512)
            started.append((ship_all(prefill, ticket, Noted(name)), sink))
        for outgoing, sink in started:
            await shipped(outgoing)
            await sink.commit()
        assert order == [0, 1, 2] * 8


async def test_a_slow_sink_holds_back_its_sender_and_nobody_else() -> None:
    async with open_nodes("inproc", count=3) as (slow, quick, decode):
        slow_ticket, slow_sink = expected(decode, 1024)
        slow_sink.gate.clear()
        held = ship_all(slow, slow_ticket, Source(random_kv(1024)))
        await asyncio.sleep(0.05)
        assert decode.stats().recv_slots_used == 2  # half of four
        ticket, sink = expected(decode, 1024)
        await shipped(ship_all(quick, ticket, Source(random_kv(1024))))
        await sink.commit()
        assert not held.done.done()
        slow_sink.gate.set()
        await shipped(held)
        await slow_sink.commit()


async def test_cancel_acts_between_frames_and_tells_the_receiver(scheme: str) -> None:
    async with open_nodes(scheme) as (prefill, decode):
        ticket, sink = expected(decode, 1024)
        source = Source(random_kv(1024))
        outgoing = start_ship(prefill, ticket, source)
        outgoing.extend(128)
        await sink.has_installed(2)
        source.gate.clear()
        outgoing.extend(512)
        await asyncio.sleep(0.02)
        outgoing.cancel()
        await asyncio.sleep(0.02)
        assert not outgoing.done.done()  # frames are being packed: their slots are not free
        source.gate.set()
        assert isinstance(await ship_error(outgoing), TransferAborted)
        error, num_tokens = await sink.loss()
        assert isinstance(error, TransferAborted)
        assert num_tokens == 128
        again, sink = expected(decode, 512)  # the connection is in step: VOID filled the gaps
        await shipped(ship_all(prefill, again, Source(random_kv(512))))
        await sink.commit()
        assert prefill.stats().endpoints == 1


async def test_cancel_before_anything_was_sent_tells_the_receiver() -> None:
    async with open_nodes("inproc") as (prefill, decode):
        ticket, sink = expected(decode, 64, first_token=16)
        outgoing = start_ship(prefill, ticket, Source(random_kv(64)))
        outgoing.cancel()
        outgoing.cancel()
        assert isinstance(await ship_error(outgoing), TransferAborted)
        error, num_tokens = await sink.loss()
        assert isinstance(error, TransferAborted)
        assert num_tokens == 16
        outgoing.extend(64)  # nothing comes of it


async def test_the_loops_lag_is_told_to_all_who_ask() -> None:
    async with open_nodes("inproc", 1) as (node,):
        await asyncio.sleep(0.3)  # a tick is due
        time.sleep(0.4)  # noqa: ASYNC251 (what nobody on the loop should do)
        await asyncio.sleep(0.3)
        assert node.stats().loop_lag_s > 0.1
        assert node.stats().loop_lag_s > 0.1, "asking takes nothing away"
