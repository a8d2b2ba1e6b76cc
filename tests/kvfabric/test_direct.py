"""The short way within a host: both ends in one process, which reads its own memory."""

import asyncio
import os
import socket
from collections.abc import Callable, Iterator

import pytest

from kvfabric import direct_receiver
from kvfabric.direct import INVITATION, MAX_WAITING, NOTE, NOTE_PACKET, NOTICE_S, TAKEN, Direct
from kvfabric.direct_end import direct_end
from kvfabric.direct_receiver import DirectReceiver
from kvfabric.direct_sender import DirectSender
from kvfabric.errors import BadFrame, PeerLost
from kvfabric.transport import Channel
from tests.kvfabric.rig import SECONDS

pytestmark = pytest.mark.asyncio

MIB = 1 << 20


@pytest.fixture(autouse=True)
def readable() -> Iterator[None]:
    yield
    direct_receiver._unreadable.clear()


def connected() -> tuple[DirectSender, DirectReceiver]:
    near, far = DirectSender(), DirectReceiver()
    assert far.accept(near.invite())
    for end in (near, far):
        assert not end.is_on
        end.begin()
        assert end.is_on
    return near, far


async def done(posted: asyncio.Future[None]) -> None:
    await asyncio.wait_for(posted, SECONDS)


async def lost(*posted: asyncio.Future[None]) -> None:
    for one in posted:
        with pytest.raises(PeerLost):
            await done(one)


async def test_frames_arrive_whole_in_order_and_are_sent_when_they_are_read() -> None:
    near, far = connected()
    sizes = [1, 100, 3 * MIB, 0, 5]
    messages = [bytearray([i + 1]) * size for i, size in enumerate(sizes)]
    sent = [near.send(Channel.FRAMES, memoryview(message)) for message in messages]
    sent.append(near.send(Channel.FRAMES, b"read-only"))
    await asyncio.sleep(0.01)
    assert not any(one.done() for one in sent), "nobody has room for them"
    buffers = [bytearray(size + 1) for size in (*sizes, 9)]
    for buffer, one in zip(buffers, sent, strict=True):
        await done(far.recv(Channel.FRAMES, buffer))
        await done(one)
    for buffer, message in zip(buffers, [*map(bytes, messages), b"read-only"], strict=True):
        assert buffer == message + b"\0"
    near.close()
    far.close()


async def test_words_go_both_ways_and_pass_frames_that_nobody_takes() -> None:
    near, far = connected()
    waiting = near.send(Channel.FRAMES, memoryview(bytearray(9)))
    for one, other in ((near, far), (far, near)):
        first = bytearray(3)
        heard = other.recv(Channel.CONTROL, first)
        await done(one.send(Channel.CONTROL, b"one"))
        await done(one.send(Channel.CONTROL, b"two"))
        await done(heard)
        second = bytearray(4)
        await done(other.recv(Channel.CONTROL, second))
        assert first + second == b"onetwo\0"
    await done(far.send(Channel.CONTROL, b"long"))
    with pytest.raises(BadFrame):
        await done(near.recv(Channel.CONTROL, bytearray(3)))
    assert not waiting.done()
    near.close()
    far.close()
    await lost(waiting)


@pytest.mark.parametrize("side", [0, 1])
async def test_closing_one_end_fails_what_is_pending_at_both(side: int) -> None:
    ends = connected()
    near, far = ends
    pending = [far.recv(Channel.FRAMES, bytearray(9)), near.recv(Channel.CONTROL, bytearray(9))]
    ends[side].close()
    ends[side].close()
    await lost(*pending)
    await lost(near.send(Channel.FRAMES, bytes(9)), far.recv(Channel.FRAMES, bytearray(9)))
    await lost(near.send(Channel.CONTROL, b"9"), far.recv(Channel.CONTROL, bytearray(9)))
    assert near.is_on, "what is closed goes no other way"
    ends[1 - side].close()


async def test_others_may_tell_of_a_peers_end_first() -> None:
    near, far = connected()
    near.send(Channel.FRAMES, memoryview(bytearray(9)))
    await asyncio.sleep(0.01)  # the note is here
    near.close()
    ended_s = asyncio.get_running_loop().time()
    posted = [far.recv(Channel.FRAMES, bytearray(9)), far.recv(Channel.CONTROL, bytearray(9))]
    await lost(*posted)
    assert asyncio.get_running_loop().time() - ended_s > 0.9 * NOTICE_S
    far.close()


async def test_what_the_sender_has_taken_back_is_not_taken_for_a_frame() -> None:
    near, far = connected()
    sent = near.send(Channel.FRAMES, memoryview(bytearray(MIB)))
    cell = near._cell
    kept = near._socket
    assert kept is not None
    near._loop.remove_reader(kept)
    near._socket = kept.dup()  # closed in its place: the note can still be heard
    near.close()
    assert not any(cell.raw)
    await lost(sent, far.recv(Channel.FRAMES, bytearray(MIB)))
    kept.close()
    far.close()


async def test_a_frame_longer_than_the_room_for_it_fails_and_the_next_one_does_not() -> None:
    near, far = connected()
    sent = [near.send(Channel.FRAMES, bytes([9]) * size) for size in (10, 9)]
    room = bytearray(9)
    with pytest.raises(BadFrame):
        await done(far.recv(Channel.FRAMES, room))
    assert not any(room)
    await done(far.recv(Channel.FRAMES, room))
    assert room == bytes([9]) * 9
    for one in sent:
        await done(one)
    near.close()
    far.close()


async def test_frames_of_a_process_that_cannot_be_read_go_another_way_next_time() -> None:
    near, far = connected()
    assert near._socket is not None
    near._socket.send(NOTE_PACKET.pack(NOTE, 8, MIB))  # in the first page, where nothing is
    await lost(far.recv(Channel.FRAMES, bytearray(MIB)))
    again = DirectSender()
    assert not DirectReceiver().accept(again.invite())
    for end in (near, far, again):
        end.close()


@pytest.mark.parametrize(
    "packet", [b"x", TAKEN, TAKEN + b"more", NOTE, NOTE_PACKET.pack(NOTE, 1, 1) + b"x"]
)
@pytest.mark.parametrize("side", [0, 1])
async def test_who_says_what_ours_do_not_loses_the_connection(packet: bytes, side: int) -> None:
    ends: tuple[Direct, Direct] = connected()
    speaker, hearer = ends[side], ends[1 - side]
    pending = hearer.recv(Channel.CONTROL, bytearray(9))
    assert speaker._socket is not None
    speaker._socket.send(packet)
    await lost(pending)
    for end in ends:
        end.close()


async def test_a_flood_that_nobody_reads_is_bounded() -> None:
    near, far = connected()
    loop = asyncio.get_running_loop()
    until = loop.time() + SECONDS
    while far._socket is not None and loop.time() < until:
        near.send(Channel.FRAMES, b"x")
        await asyncio.sleep(0)
    assert far._socket is None
    assert len(far._notes) <= MAX_WAITING
    near.close()
    far.close()


def _nobody_listens(invitation: bytes) -> bytes:
    name, cell = INVITATION.unpack(invitation)
    return INVITATION.pack(bytes(reversed(name)), cell)


def _another_cell(invitation: bytes) -> bytes:
    name, cell = INVITATION.unpack(invitation)
    return INVITATION.pack(name, cell + 1)


def _no_memory_there(invitation: bytes) -> bytes:
    name, _ = INVITATION.unpack(invitation)
    return INVITATION.pack(name, 8)


@pytest.mark.parametrize(
    "change",
    [_nobody_listens, _another_cell, _no_memory_there, lambda _: b"", lambda i: i[:-1]],
)
async def test_only_a_true_invitation_is_accepted(change: Callable[[bytes], bytes]) -> None:
    near, far = DirectSender(), DirectReceiver()
    assert not far.accept(change(near.invite()))
    near.withdraw()
    for end in (near, far):
        assert not end.is_on, "UCX carries on"
    near.close()
    far.close()


async def test_a_process_of_another_user_is_not_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    near, far = DirectSender(), DirectReceiver()
    invitation = near.invite()
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert not far.accept(invitation)
    stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    stranger.connect(b"\0" + near._cell.raw)
    with pytest.raises(PeerLost):
        near.begin()
    stranger.close()
    near.close()
    far.close()


async def test_who_says_that_it_came_and_did_not_is_lost() -> None:
    near = DirectSender()
    near.invite()
    with pytest.raises(PeerLost):
        near.begin()
    near.close()


@pytest.mark.parametrize(
    ("tls", "lanes", "is_there"),
    [
        ("all", ("posix", "tcp"), True),
        ("posix,sysv,cma,tcp,self", ("posix", "sysv", "tcp"), True),
        ("sm", ("sysv",), True),
        ("^cma", ("posix",), False),
        ("^ib", ("posix",), True),
        ("posix,sysv,tcp,self", ("posix",), False),
        ("tcp,self", ("tcp",), False),
        ("all", ("tcp",), False),
    ],
)
async def test_where_ucx_goes_another_way_or_must_so_do_we(
    tls: str, lanes: tuple[str, ...], is_there: bool
) -> None:
    assert isinstance(direct_end(lanes, tls, connects=True), DirectSender) is is_there
