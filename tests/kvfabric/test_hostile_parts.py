"""A receiver against several connections that send parts of one transfer, or claim to."""

import asyncio

import numpy as np
import pytest

from kvfabric.control import Abort, AbortReason
from kvfabric.errors import BadFrame, DeadlineExceeded, PeerLost, TransferAborted
from tests.kvfabric.raw_peer import commit_message, raw_sender, whole_transfer
from tests.kvfabric.rig import expected, idle, open_nodes, random_kv
from tests.kvfabric.test_hostile_wire import works

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.usefixtures("ucx_stays_up")]

LEFT, RIGHT = range(0, 1), range(1, 2)


async def test_two_connections_send_a_transfer_together(scheme: str) -> None:
    async with (
        open_nodes(scheme, count=1) as (node,),
        raw_sender(scheme, node, generation=7) as left,
        raw_sender(scheme, node, generation=8) as right,
    ):
        kv = random_kv(400)
        ticket, sink = expected(node, 400)
        *frames, commit = whole_transfer(ticket, kv, LEFT)
        await left.offer_and_send(commit, *frames[1:])
        await right.offer_and_send(*whole_transfer(ticket, kv, RIGHT))
        await sink.has_installed(2 * len(frames) - 1)
        assert not sink.ended.done()
        await left.offer_and_send(frames[0])
        payload, report = await sink.commit()
        assert np.array_equal(sink.kv, kv)
        assert payload == b"commit"
        assert report.frames == 2 * len(frames)
        assert report.nbytes == kv.nbytes


async def test_the_payload_is_that_of_the_first_head_s_commit() -> None:
    async with (
        open_nodes("inproc", count=1) as (node,),
        raw_sender("inproc", node) as left,
        raw_sender("inproc", node) as right,
    ):
        kv = random_kv(40)
        ticket, sink = expected(node, 40)
        for peer, heads, payload in ((left, LEFT, b"first"), (right, RIGHT, b"")):
            *frames, _ = whole_transfer(ticket, kv, heads)
            commit = commit_message(ticket, len(frames), payload, heads)
            await peer.offer_and_send(*frames, commit)
        assert (await sink.commit())[0] == b"first"


async def test_a_stranger_s_part_is_refused_and_disturbs_nobody() -> None:
    """Heads that are taken, heads that are not the receiver's; and an ABORT of what others send."""
    async with (
        open_nodes("inproc", count=1) as (node,),
        raw_sender("inproc", node) as left,
        raw_sender("inproc", node) as right,
        raw_sender("inproc", node) as thief,
    ):
        kv = random_kv(200)
        ticket, sink = expected(node, 200)
        parts = whole_transfer(ticket, kv, LEFT), whole_transfer(ticket, kv, RIGHT)
        await left.offer_and_send(parts[0][0])
        await right.offer_and_send(parts[1][0])
        await sink.has_installed(2)
        outside = commit_message(ticket, 0, heads=range(2, 4))
        for message in (parts[0][0], parts[1][1], parts[1][-1], outside):
            await thief.offer_and_send(message)
            assert await thief.heard_abort() == Abort(ticket.transfer_id, AbortReason.TAKEN)
        await thief.say(Abort(ticket.transfer_id, AbortReason.CANCELLED))
        await left.offer_and_send(*parts[0][1:])
        await right.offer_and_send(*parts[1][1:])
        await sink.commit()
        assert np.array_equal(sink.kv, kv)


async def test_a_part_that_grows_into_another_costs_the_transfer() -> None:
    async with (
        open_nodes("inproc", count=1) as (node,),
        raw_sender("inproc", node) as left,
        raw_sender("inproc", node) as right,
    ):
        kv = random_kv(200)
        ticket, sink = expected(node, 200)
        await left.offer_and_send(whole_transfer(ticket, kv, LEFT)[0])
        await sink.has_installed(1)
        await right.offer_and_send(whole_transfer(ticket, kv, RIGHT)[0])
        await sink.has_installed(2)
        await right.offer_and_send(whole_transfer(ticket, kv, LEFT)[1])
        assert isinstance((await sink.loss())[0], BadFrame)
        for peer in (left, right):
            assert await peer.heard_abort() == Abort(ticket.transfer_id, AbortReason.LOST)
        await works(node)


async def test_who_comes_first_with_heads_of_nobody_costs_the_transfer() -> None:
    async with open_nodes("inproc", count=1) as (node,), raw_sender("inproc", node) as peer:
        ticket, sink = expected(node, 200)
        await peer.offer_and_send(commit_message(ticket, 0, heads=range(1, 3)))
        assert isinstance((await sink.loss())[0], BadFrame)
        assert await peer.heard_abort() == Abort(ticket.transfer_id, AbortReason.LOST)
        assert node.stats().errors == {"BadFrame": 1}
        await works(node)


async def test_a_second_commit_of_a_part_that_says_otherwise_costs_the_transfer() -> None:
    async with open_nodes("inproc", count=1) as (node,), raw_sender("inproc", node) as peer:
        ticket, sink = expected(node, 200)
        commits = [commit_message(ticket, count, heads=LEFT) for count in (9, 9, 8)]
        await peer.offer_and_send(*commits)
        error, _ = await sink.loss()
        assert "earlier COMMIT says 9" in str(error)
        await works(node)


async def test_a_part_that_never_commits_meets_the_deadline() -> None:
    async with (
        open_nodes("inproc", count=1, transfer_timeout_s=0.1) as (node,),
        raw_sender("inproc", node) as left,
        raw_sender("inproc", node) as right,
    ):
        kv = random_kv(200)
        ticket, sink = expected(node, 200)
        await left.offer_and_send(*whole_transfer(ticket, kv, LEFT))
        await right.offer_and_send(*whole_transfer(ticket, kv, RIGHT)[:-1])
        error, num_tokens = await sink.loss()
        assert isinstance(error, DeadlineExceeded)
        assert num_tokens == 200
        for peer in (left, right):
            assert await peer.heard_abort() == Abort(ticket.transfer_id, AbortReason.LOST)


async def test_the_death_of_one_connection_loses_the_transfer(scheme: str) -> None:
    """Verified is what both parts have; the other sender hears of it."""
    async with open_nodes(scheme, count=1) as (node,), raw_sender(scheme, node, 7) as left:
        kv = random_kv(400)
        ticket, sink = expected(node, 400)
        left_frames = whole_transfer(ticket, kv, LEFT)[:-1]
        async with raw_sender(scheme, node, 8) as right:
            await left.offer_and_send(*left_frames[:3])
            await right.offer_and_send(whole_transfer(ticket, kv, RIGHT)[0])
            await sink.has_installed(4)
        error, num_tokens = await sink.loss()
        assert isinstance(error, PeerLost)
        (first,) = (f for f in sink.installed if f.first_head == 1)
        assert num_tokens == first.num_tokens
        assert await left.heard_abort() == Abort(ticket.transfer_id, AbortReason.LOST)
        await idle(node)
        await works(node)


async def test_a_connection_that_has_sent_all_of_its_part_may_go() -> None:
    async with open_nodes("inproc", count=1) as (node,), raw_sender("inproc", node) as left:
        kv = random_kv(400)
        ticket, sink = expected(node, 400)
        mine, theirs = whole_transfer(ticket, kv, LEFT), whole_transfer(ticket, kv, RIGHT)
        await left.offer_and_send(mine[0])
        async with raw_sender("inproc", node) as right:
            await right.offer_and_send(*theirs)
            await sink.has_installed(len(theirs))
        await asyncio.sleep(0.02)
        await left.offer_and_send(*mine[1:])
        await sink.commit()
        assert np.array_equal(sink.kv, kv)


async def test_a_sender_that_has_not_begun_may_give_up_for_all() -> None:
    async with (
        open_nodes("inproc", count=1) as (node,),
        raw_sender("inproc", node) as left,
        raw_sender("inproc", node) as right,
    ):
        ticket, sink = expected(node, 200)
        await left.offer_and_send(whole_transfer(ticket, random_kv(200), LEFT)[0])
        await sink.has_installed(1)
        await right.say(Abort(ticket.transfer_id, AbortReason.CANCELLED))
        assert isinstance((await sink.loss())[0], TransferAborted)
        assert await left.heard_abort() == Abort(ticket.transfer_id, AbortReason.LOST)
