"""A receiver against a peer that says what no peer of ours would."""

import asyncio

import numpy as np
import pytest

from kvfabric.control import CONTROL_NBYTES, Abort, AbortReason, Hello, Offer, Refused, Welcome
from kvfabric.errors import (
    BadFrame,
    ChecksumMismatch,
    DeadlineExceeded,
    PeerLost,
    TransferAborted,
)
from kvfabric.node import Node
from kvfabric.receiver import MAX_OFFERED
from kvfabric.transport import Channel, open_transport
from tests.kvfabric.raw_peer import (
    RawSender,
    commit_message,
    kv_message,
    raw_sender,
    whole_plan,
    whole_transfer,
)
from tests.kvfabric.rig import (
    FINGERPRINT,
    SECONDS,
    expected,
    idle,
    make_ticket,
    open_nodes,
    random_kv,
)

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.usefixtures("ucx_stays_up")]


async def works(node: Node) -> None:
    """A peer of ours gets its transfer through."""
    kv = random_kv(300)
    ticket, sink = expected(node, 300)
    async with raw_sender(node.address.partition("://")[0], node, generation=5) as peer:
        await peer.offer_and_send(*whole_transfer(ticket, kv))
        await sink.commit()
    assert np.array_equal(sink.kv, kv)


async def test_frames_in_any_order_and_twice_are_installed_once(scheme: str) -> None:
    async with open_nodes(scheme, count=1) as (node,), raw_sender(scheme, node) as peer:
        kv = random_kv(400)
        ticket, sink = expected(node, 400)
        *frames, commit = whole_transfer(ticket, kv)
        await peer.offer_and_send(frames[1], frames[1], commit, commit)
        await peer.offer_and_send(frames[0], *reversed(frames[2:]))
        _, report = await sink.commit()
        assert np.array_equal(sink.kv, kv)
        assert report.frames == len(frames)
        assert node.stats().dropped_frames == 1


async def test_late_and_unknown_frames_are_answered_with_abort(scheme: str) -> None:
    async with open_nodes(scheme, count=1) as (node,), raw_sender(scheme, node) as peer:
        ticket, sink = expected(node, 200)
        messages = whole_transfer(ticket, random_kv(200))
        await peer.offer_and_send(*messages)
        await sink.commit()
        await peer.offer_and_send(messages[0])
        assert await peer.heard_abort() == Abort(ticket.transfer_id, AbortReason.UNKNOWN)
        stranger = make_ticket(node, 200)
        await peer.offer_and_send(whole_transfer(stranger, random_kv(200))[0])
        assert await peer.heard_abort() == Abort(stranger.transfer_id, AbortReason.UNKNOWN)


async def test_another_connection_cannot_take_over_or_abort_a_transfer() -> None:
    async with (
        open_nodes("inproc", count=1) as (node,),
        raw_sender("inproc", node) as peer,
        raw_sender("inproc", node) as thief,
    ):
        kv = random_kv(400)
        ticket, sink = expected(node, 400)
        messages = whole_transfer(ticket, kv)
        await peer.offer_and_send(messages[0])
        await sink.has_installed(1)
        await thief.offer_and_send(messages[1])
        assert await thief.heard_abort() == Abort(ticket.transfer_id, AbortReason.TAKEN)
        await thief.say(Abort(ticket.transfer_id, AbortReason.CANCELLED))
        await peer.offer_and_send(*messages[1:])
        await sink.commit()
        assert np.array_equal(sink.kv, kv)


async def test_a_corrupt_payload_costs_its_transfer_only(scheme: str) -> None:
    async with open_nodes(scheme, count=1) as (node,), raw_sender(scheme, node) as peer:
        ticket, sink = expected(node, 400)
        other, other_sink = expected(node, 100)
        messages = whole_transfer(ticket, random_kv(400))
        messages[3][1000] ^= 1
        await peer.offer_and_send(*messages[:3])
        await sink.has_installed(3)
        await peer.offer_and_send(messages[3])
        error, num_tokens = await sink.loss()
        assert isinstance(error, ChecksumMismatch)
        assert num_tokens == sum(f.num_tokens for f in sink.installed)
        assert await peer.heard_abort() == Abort(ticket.transfer_id, AbortReason.LOST)
        await peer.offer_and_send(*whole_transfer(other, random_kv(100)))
        await other_sink.commit()
        assert node.stats().errors == {"ChecksumMismatch": 1}


async def test_a_frame_that_overlaps_another_costs_its_transfer_only() -> None:
    async with open_nodes("inproc", count=1) as (node,), raw_sender("inproc", node) as peer:
        ticket, sink = expected(node, 400)
        kv, frame = random_kv(400), whole_plan(ticket)[0]
        first, again = (kv_message(ticket, sequence, frame, kv) for sequence in (0, 1))
        await peer.offer_and_send(first, again)
        assert isinstance((await sink.loss())[0], BadFrame)
        await peer.heard_abort()
        await works(node)


async def test_a_commit_that_counts_too_few_costs_its_transfer_only() -> None:
    async with open_nodes("inproc", count=1) as (node,), raw_sender("inproc", node) as peer:
        ticket, sink = expected(node, 400)
        messages = whole_transfer(ticket, random_kv(400))
        await peer.offer_and_send(messages[0], messages[1], commit_message(ticket, 1))
        assert isinstance((await sink.loss())[0], BadFrame)
        await peer.heard_abort()
        await works(node)


async def test_a_frame_cut_short_breaks_the_connection(scheme: str) -> None:
    async with open_nodes(scheme, count=1) as (node,), raw_sender(scheme, node) as peer:
        ticket, sink = expected(node, 400)
        messages = whole_transfer(ticket, random_kv(400))
        await peer.offer_and_send(messages[0], messages[1][:-100])
        assert isinstance((await sink.loss())[0], BadFrame)
        await peer.broken()
        await works(node)


async def test_a_frame_larger_than_a_slot_breaks_the_connection(scheme: str) -> None:
    async with open_nodes(scheme, count=1) as (node,), raw_sender(scheme, node) as peer:
        ticket, sink = expected(node, 400)
        await peer.offer_and_send(whole_transfer(ticket, random_kv(400))[0])
        await sink.has_installed(1)
        await peer.offer(1)
        peer.endpoint.send(Channel.FRAMES, bytes(1 << 20))
        assert isinstance((await sink.loss())[0], BadFrame)
        await peer.broken()
        await works(node)


@pytest.mark.parametrize(
    "message", [Offer(MAX_OFFERED + 1), Welcome(FINGERPRINT, 1), Hello(FINGERPRINT, 1, 1)]
)
async def test_what_a_sender_never_says_breaks_the_connection(message: Offer) -> None:
    async with open_nodes("inproc", count=1) as (node,), raw_sender("inproc", node) as peer:
        await peer.say(message)
        await peer.broken()
        await works(node)


async def test_a_frame_offered_and_not_sent_meets_its_deadline() -> None:
    async with open_nodes("inproc", count=1, transfer_timeout_s=0.1) as (node,):
        async with raw_sender("inproc", node) as peer:
            await peer.offer(2)
            await peer.broken()
            await idle(node)
        await works(node)


async def test_a_peer_that_offers_and_freezes_pins_no_slot_for_long() -> None:
    """Each frame has its time from the one before, however long the transfer itself may pause."""
    async with (
        open_nodes("inproc", count=1, offer_timeout_s=0.4, transfer_timeout_s=60.0) as (node,),
        raw_sender("inproc", node) as peer,
    ):
        ticket, sink = expected(node, 400)
        messages = whole_transfer(ticket, random_kv(400))
        await peer.offer(len(messages))
        for message in messages[:3]:
            await asyncio.sleep(0.25)
            await peer.send(message)
        await sink.has_installed(3)
        assert node.stats().recv_slots_used == node.config.recv_slots // 2, "its half is posted"
        error, _ = await sink.loss()
        assert isinstance(error, DeadlineExceeded)
        await peer.broken()
        await idle(node)
        await works(node)


async def test_an_idle_peer_holds_no_slot() -> None:
    async with open_nodes("inproc", count=1) as (node,), raw_sender("inproc", node):
        await asyncio.sleep(0.02)
        assert node.stats().recv_slots_used == 0


async def test_a_lost_connection_loses_its_transfers_at_once(scheme: str) -> None:
    async with open_nodes(scheme, count=1) as (node,):
        async with raw_sender(scheme, node) as peer:
            ticket, sink = expected(node, 400)
            messages = whole_transfer(ticket, random_kv(400))
            await peer.offer(len(messages))
            await peer.send(messages[0])
            await sink.has_installed(1)
        error, num_tokens = await sink.loss()
        assert isinstance(error, PeerLost)
        assert num_tokens == sink.installed[0].num_tokens
        await idle(node)
        await works(node)


async def test_the_sender_may_give_up(scheme: str) -> None:
    async with open_nodes(scheme, count=1) as (node,), raw_sender(scheme, node) as peer:
        ticket, sink = expected(node, 400)
        await peer.say(Abort(ticket.transfer_id, AbortReason.CANCELLED))
        assert isinstance((await sink.loss())[0], TransferAborted)


async def test_who_greets_oddly_is_turned_away() -> None:
    async with open_nodes("inproc", count=1, connect_timeout_s=0.1) as (node,):
        transport = open_transport("inproc://")
        refused = [Hello(FINGERPRINT, 1, 99), Hello(b"g" * 32, 1, 1), Hello(FINGERPRINT, 1, 1, 9)]
        for hello in refused:
            peer = RawSender(await transport.connect(node.address, SECONDS))
            await peer.say(hello)
            assert isinstance(await peer.heard(), Refused)
            await peer.broken()
        junk = RawSender(await transport.connect(node.address, SECONDS))
        junk.endpoint.send(Channel.CONTROL, b"GET / HTTP/1.1\r\n".ljust(CONTROL_NBYTES))
        await junk.broken()
        await RawSender(await transport.connect(node.address, SECONDS)).broken()  # says nothing
        await works(node)
