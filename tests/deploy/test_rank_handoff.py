"""Handoffs between workers of several ranks: what their pools hold, byte by byte, and what is given
back however a transfer ends."""

import asyncio
import socket
from collections.abc import Iterator
from concurrent.futures import Future
from itertools import product
from pathlib import Path

import pytest
import torch

from decode_server.handoff import Committed, Lost
from engine.errors import UnknownRequest
from engine.kv_codec import Codec
from kvfabric.errors import PeerLost, TransferAborted
from kvfabric.link_speed import LinkSpeed
from kvfabric.ranks.fabric import RankedFabric
from kvfabric.ticket import KVShard, Ticket, new_transfer_id
from tests.deploy.ranks_rig import (
    HALF,
    NUM_TOKENS,
    Relay,
    Worker,
    assert_ranks_are_told,
    model_of,
    next_of,
    relay,
    report_of,
    started,
)
from tests.kvfabric.rig import FINGERPRINT, SECONDS, SHAPE, Sink, Source, random_kv
from tests.relay import eventually


@pytest.fixture(autouse=True)
def no_faults_of_ours(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """An exception in a task of the fabric is logged, and would be seen by nobody else."""
    yield
    assert not [record for record in caplog.get_records("call") if record.levelname == "ERROR"]


@pytest.mark.parametrize(("prefill_ranks", "decode_ranks"), list(product((1, 2, 3), repeat=2)))
async def test_every_byte_in_its_place(
    tiny_llama: Path, prefill_ranks: int, decode_ranks: int
) -> None:
    async with relay(
        tiny_llama, prefill_ranks, decode_ranks, 3 * prefill_ranks + decode_ranks
    ) as r:
        r.decode.claimed.set_result(r.there)
        shipment = r.ship(r.handoff.begin(0))
        for num_tokens in (30, 31, HALF, NUM_TOKENS):
            shipment.extend(r.compute(num_tokens))
        shipment.commit(b"token 0")
        report, verdict = await report_of(shipment), await next_of(r.verdicts)
        assert isinstance(verdict, Committed)
        assert verdict.commit == b"token 0"
        sent = r.prefill.kv(r.blocks, NUM_TOKENS)
        assert torch.equal(r.decode.kv(r.there.block_table, NUM_TOKENS), sent)
        assert report.nbytes == verdict.report.nbytes == sent.nbytes
        assert report.frames == verdict.report.frames
        assert_ranks_are_told(report, prefill_ranks)
        assert_ranks_are_told(verdict.report, decode_ranks)
        for worker, direction in ((r.prefill, "sent"), (r.decode, "received")):
            for stats, heads in zip(worker.fabric.rank_stats(), worker.heads, strict=True):
                nbytes = sent.nbytes * len(heads) // len(range(5))
                assert getattr(stats, f"{direction}_nbytes") == nbytes
        await r.assert_all_back()


async def test_a_slow_link_gets_smaller_frames_of_the_same_kv(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every rank encodes its own."""
    monkeypatch.setattr(LinkSpeed, "nbytes_per_s", 1e4)
    async with relay(tiny_llama, 2, 3) as r:
        r.decode.claimed.set_result(r.there)
        shipment = r.ship(r.handoff.begin(0))
        shipment.extend(r.compute(NUM_TOKENS))
        shipment.commit(b"")
        report, verdict = await report_of(shipment), await next_of(r.verdicts)
        assert isinstance(verdict, Committed)
        sent = r.prefill.kv(r.blocks, NUM_TOKENS)
        assert torch.equal(r.decode.kv(r.there.block_table, NUM_TOKENS), sent)
        assert report.nbytes == verdict.report.nbytes < sent.nbytes
        assert report.codec == Codec.PLANES
        await r.assert_all_back()


async def test_cancelled_half_way(tiny_llama: Path) -> None:
    async with relay(tiny_llama) as r:
        r.decode.claimed.set_result(r.there)
        shipment = await r.half_way(r.handoff.begin(0))
        shipment.cancel()
        with pytest.raises(TransferAborted):
            await report_of(shipment)
        verdict = await next_of(r.verdicts)
        assert isinstance(verdict, Lost)
        assert 0 <= verdict.num_tokens <= HALF
        good = verdict.num_tokens
        sent, there = r.prefill.kv(r.blocks, good), r.decode.kv(r.there.block_table, good)
        assert torch.equal(there, sent), "what is verified is there"
        await r.assert_all_back()


async def test_forgotten_half_way(tiny_llama: Path) -> None:
    async with relay(tiny_llama) as r:
        r.decode.claimed.set_result(r.there)
        shipment = await r.half_way(r.handoff.begin(0))
        r.handoff.drop()
        shipment.extend(r.compute(NUM_TOKENS))
        with pytest.raises(TransferAborted):
            await report_of(shipment)
        await r.assert_all_back()
        assert r.verdicts.empty()


async def test_given_up_half_way_and_resumed(tiny_llama: Path) -> None:
    """The next ticket asks for what the ranks do not all have, into the same blocks."""
    async with relay(tiny_llama, 3, 2) as r:
        r.decode.claimed.set_result(r.there)
        ticket = r.handoff.begin(0)
        shipment = await r.half_way(ticket)
        r.handoff.give_up(ticket.transfer_id)
        verdict = await next_of(r.verdicts)
        assert isinstance(verdict, Lost)
        shipment.extend(r.compute(NUM_TOKENS))
        with pytest.raises(TransferAborted):
            await report_of(shipment)
        shipment = r.ship(r.handoff.resume(verdict.num_tokens))
        shipment.extend(NUM_TOKENS)
        shipment.commit(b"")
        await report_of(shipment)
        assert isinstance(await next_of(r.verdicts), Committed)
        sent = r.prefill.kv(r.blocks, NUM_TOKENS)
        assert torch.equal(r.decode.kv(r.there.block_table, NUM_TOKENS), sent)
        await r.assert_all_back()


async def test_a_request_that_is_gone_when_the_first_frame_comes(tiny_llama: Path) -> None:
    async with relay(tiny_llama) as r:
        r.decode.claimed.set_exception(UnknownRequest("it was aborted"))
        shipment = r.ship(r.handoff.begin(0))
        shipment.extend(r.compute(NUM_TOKENS))
        with pytest.raises(TransferAborted):
            await report_of(shipment)
        verdict = await next_of(r.verdicts)
        assert isinstance(verdict, Lost)
        assert verdict.num_tokens == 0
        await r.assert_all_back()


async def slots_of_all_ranks_are_told(worker: Worker) -> None:
    """Frames wait in them for blocks; rank 0 knows for whom, on every rank."""

    def are_told() -> bool:
        told = worker.fabric.lent().result(1)
        used = [stats.recv_slots_used for stats in worker.fabric.rank_stats()]
        owners = {(slot.budget, slot.owner) for slot in told if slot.owner}
        return len(used) == 3 and all(used) and len(told) == sum(used) and len(owners) == 1

    await eventually(are_told)


async def test_forgotten_while_the_blocks_are_claimed(tiny_llama: Path) -> None:
    """They are lent to a rank that has forgotten the transfer: it gives them back at once."""
    async with relay(tiny_llama, 2, 3) as r:
        shipment = r.ship(r.handoff.begin(0))
        shipment.extend(r.compute(HALF))
        fabric = r.decode.fabric
        assert isinstance(fabric, RankedFabric)
        await eventually(lambda: fabric.num_claims_under_way == 2)
        await slots_of_all_ranks_are_told(r.decode)
        r.handoff.drop()
        await eventually(lambda: not r.decode.fabrics[2].stats().expected_transfers)
        r.decode.claimed.set_result(r.there)
        shipment.extend(r.compute(NUM_TOKENS))
        with pytest.raises(TransferAborted):
            await report_of(shipment)
        await r.assert_all_back()


@pytest.mark.parametrize("is_granted", [False, True])
async def test_cancelled_before_anything_was_computed(tiny_llama: Path, is_granted: bool) -> None:
    async with relay(tiny_llama, 3, 2) as r:
        r.decode.claimed.set_result(r.there)
        if not is_granted:
            r.granted = Future()
        shipment = r.ship(r.handoff.begin(0))
        shipment.cancel()
        shipment.cancel()
        with pytest.raises(TransferAborted):
            await report_of(shipment)
        if not is_granted:
            r.granted.set_result(r.here)
        assert isinstance(await next_of(r.verdicts), Lost)
        await r.assert_all_back()


async def test_a_prefill_request_that_is_gone(tiny_llama: Path) -> None:
    async with relay(tiny_llama) as r:
        r.granted = Future()
        r.granted.set_exception(UnknownRequest("it was aborted"))
        shipment = r.ship(r.handoff.begin(0))
        with pytest.raises(TransferAborted, match="aborted"):
            await report_of(shipment)
        assert isinstance(await next_of(r.verdicts), Lost)
        await r.assert_all_back()


def kill(worker: Worker, rank: int) -> None:
    """As rank 0 sees it."""
    worker.ends[rank - 1].shutdown(socket.SHUT_RDWR)


async def test_a_decode_rank_dies_half_way(tiny_llama: Path) -> None:
    async with relay(tiny_llama, 2, 3) as r:
        r.decode.claimed.set_result(r.there)
        shipment = await r.half_way(r.handoff.begin(0))
        kill(r.decode, 1)
        verdict = await next_of(r.verdicts)
        assert isinstance(verdict, Lost)
        assert isinstance(verdict.error, PeerLost | TransferAborted)
        assert verdict.num_tokens == 0, "nobody knows what it had"
        shipment.extend(r.compute(NUM_TOKENS))
        with pytest.raises(TransferAborted):
            await report_of(shipment)
        handoff, verdict_again = r.decode.handoff()
        handoff.begin(0)
        assert isinstance(await next_of(verdict_again), Lost)
        await r.assert_all_back()


async def test_a_prefill_rank_dies_half_way(tiny_llama: Path) -> None:
    async with relay(tiny_llama, 3, 2) as r:
        r.decode.claimed.set_result(r.there)
        shipment = await r.half_way(r.handoff.begin(0))
        kill(r.prefill, 2)
        with pytest.raises((PeerLost, TransferAborted)):  # whichever end notices first
            await report_of(shipment)
        assert isinstance(await next_of(r.verdicts), Lost)
        late = r.ship(r.handoff.resume(0))
        with pytest.raises(PeerLost, match="rank 2"):
            await report_of(late)
        r.handoff.drop()
        await r.assert_all_back()


async def test_closing_half_way_gives_all_back(tiny_llama: Path) -> None:
    model = model_of(tiny_llama)
    with started(model, 2, 16) as prefill:
        with started(model, 2, 16) as decode:
            r = Relay(prefill, decode, 0)
            decode.claimed.set_result(r.there)
            shipment = await r.half_way(r.handoff.begin(0))
            await asyncio.to_thread(decode.fabric.close)
            assert isinstance(await next_of(r.verdicts), Lost)
            shipment.extend(r.compute(NUM_TOKENS))
            with pytest.raises((PeerLost, TransferAborted)):
                await report_of(shipment)
        await asyncio.to_thread(r.there.close_and_drain)
        await prefill.assert_idle()
        await asyncio.to_thread(r.here.close_and_drain)


async def test_without_a_lender_it_is_rank_0_alone(tiny_llama: Path) -> None:
    """As the fabric's self-test does, for KV that has no blocks anywhere."""
    model = model_of(tiny_llama)
    with started(model, 2, 16) as prefill, started(model, 2, 16) as decode:
        fabric, kv = decode.fabric, random_kv(40)
        shard = KVShard(fabric.address, fabric.config.generation, 0, SHAPE.num_heads)
        tickets = [Ticket(new_transfer_id(), (shard,), FINGERPRINT, 0, 40, 16) for _ in range(3)]
        sinks = [fabric.call(a_sink(40)).result(SECONDS) for _ in tickets]
        for ticket, sink in zip(tickets, sinks, strict=True):
            fabric.expect(ticket, SHAPE, sink)
        shipment = prefill.fabric.ship(tickets[0], SHAPE, Source(kv))
        shipment.extend(40)
        shipment.commit(b"")
        await report_of(shipment)
        fabric.call(sinks[0].commit()).result(SECONDS)
        fabric.forget(tickets[1].transfer_id)
        fabric.give_up(tickets[2].transfer_id)
        fabric.call(sinks[2].loss()).result(SECONDS)
        assert not sinks[1].ended.done()
        await prefill.assert_idle()
        await decode.assert_idle()


async def a_sink(num_tokens: int) -> Sink:
    return Sink(num_tokens)
