"""The contract of a transport, as coroutines that take an address: every transport passes them."""

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from kvfabric.errors import BadFrame, DeadlineExceeded, FabricError, PeerLost
from kvfabric.transport import Channel, Endpoint, Transport, open_transport, split_address
from tests.kvfabric.rig import SECONDS, listen_address, no_tasks_left

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.usefixtures("ucx_stays_up")]


MIB = 1 << 20

Check = Callable[[str], Awaitable[None]]


@asynccontextmanager
async def connected(listen: str) -> AsyncIterator[tuple[Endpoint, Endpoint]]:
    """Both ends of a connection."""
    transport = open_transport(listen)
    accepted: asyncio.Queue[Endpoint] = asyncio.Queue()
    listener = await transport.listen(listen, accepted.put_nowait)
    near = await transport.connect(listener.address, SECONDS)
    far = await asyncio.wait_for(accepted.get(), SECONDS)
    try:
        yield near, far
    finally:
        near.abort()
        far.abort()
        listener.close()
        del near, far, listener
        await transport.close()
    await no_tasks_left()


async def done(posted: asyncio.Future[None]) -> None:
    await asyncio.wait((posted,), timeout=SECONDS)
    assert posted.done()
    posted.result()


async def failed(posted: asyncio.Future[None]) -> BaseException | None:
    await asyncio.wait((posted,), timeout=SECONDS)
    assert posted.done()
    return posted.exception()


async def check_messages_arrive_whole_and_in_order(listen: str) -> None:
    async with connected(listen) as (near, far):
        sizes = [1, 100, 10_000, 3 * MIB, 5]
        messages = [bytes([i + 1]) * size for i, size in enumerate(sizes)]
        buffers = [bytearray(size) for size in sizes]
        received = [far.recv(Channel.FRAMES, buffer) for buffer in buffers]
        sent = [near.send(Channel.FRAMES, message) for message in messages]
        for posted in (*sent, *received):
            await done(posted)
        assert buffers == messages


async def check_channels_do_not_mix_and_both_ways_work(listen: str) -> None:
    async with connected(listen) as (near, far):
        control, frame, back = bytearray(3), bytearray(3), bytearray(3)
        posted = [
            far.recv(Channel.CONTROL, control),
            far.recv(Channel.FRAMES, frame),
            near.recv(Channel.CONTROL, back),
            near.send(Channel.FRAMES, b"fra"),
            near.send(Channel.CONTROL, b"con"),
            far.send(Channel.CONTROL, b"bac"),
        ]
        for one in posted:
            await done(one)
        assert [control, frame, back] == [bytearray(b) for b in (b"con", b"fra", b"bac")]


async def check_a_short_message_fills_the_front(listen: str) -> None:
    async with connected(listen) as (near, far):
        buffer = memoryview(bytearray(b"\xaa" * 100))
        received = far.recv(Channel.FRAMES, buffer[10:])
        await done(near.send(Channel.FRAMES, b"short"))
        await done(received)
        assert bytes(buffer[10:16]) == b"short\xaa"


async def check_a_long_message_is_a_bad_frame(listen: str) -> None:
    async with connected(listen) as (near, far):
        buffer = memoryview(bytearray(200))
        received = far.recv(Channel.FRAMES, buffer[:100])
        near.send(Channel.FRAMES, b"x" * 101)
        assert isinstance(await failed(received), BadFrame)
        assert bytes(buffer[100:]) == bytes(100)


async def check_a_large_send_waits_for_its_receive(listen: str) -> None:
    async with connected(listen) as (near, far):
        sent = near.send(Channel.FRAMES, bytes(3 * MIB))
        await asyncio.wait((sent,), timeout=0.1)
        assert not sent.done()
        await done(far.recv(Channel.FRAMES, bytearray(3 * MIB)))
        await done(sent)


async def check_a_cancelled_wait_leaves_the_operation(listen: str) -> None:
    async with connected(listen) as (near, far):
        buffer = bytearray(4)
        received = far.recv(Channel.FRAMES, buffer)
        waiting = asyncio.create_task(asyncio.wait((received,)))
        await asyncio.sleep(0.01)
        waiting.cancel()
        await done(near.send(Channel.FRAMES, b"late"))
        await done(received)
        assert buffer == b"late"


class _Watched(bytearray):
    """A buffer that can be referred to weakly."""


async def check_a_cancelled_wait_leaves_the_buffer(listen: str) -> None:
    """Nobody else has it any more: were it freed, the message would land in other people's."""
    async with connected(listen) as (_, far):

        async def wait(buffer: bytearray) -> None:
            await far.recv(Channel.FRAMES, buffer)

        buffer = _Watched(4)
        is_held = weakref.ref(buffer)
        waiting = asyncio.create_task(wait(buffer))
        await asyncio.sleep(0.01)
        waiting.cancel()
        await asyncio.wait((waiting,))
        del buffer, waiting
        gc.collect()
        assert is_held()
        far.abort()  # and what comes of the operation then is no news


async def check_abort_fails_what_is_pending_at_both_ends(listen: str) -> None:
    for aborting in (0, 1):
        async with connected(listen) as ends:
            pending = [end.recv(Channel.FRAMES, bytearray(9)) for end in ends]
            pending += [ends[1 - aborting].send(Channel.CONTROL, bytes(3 * MIB))]
            await asyncio.sleep(0.02)
            ends[aborting].abort()
            ends[aborting].abort()  # again does nothing
            for posted in pending:
                assert isinstance(await failed(posted), PeerLost)
            for end in ends:
                assert isinstance(await failed(end.send(Channel.FRAMES, bytes(3 * MIB))), PeerLost)
                assert isinstance(await failed(end.recv(Channel.FRAMES, bytearray(9))), PeerLost)


async def check_nobody_there(listen: str, address: str) -> None:
    transport: Transport = open_transport(listen)
    with pytest.raises((PeerLost, DeadlineExceeded)):
        await transport.connect(address, 0.3)
    await transport.close()


async def check_it_says_what_it_travels_over(listen: str, names: set[str]) -> None:
    async with connected(listen) as (near, far):
        assert names & set(near.transports)
        assert near.transports == far.transports


@pytest.mark.parametrize(
    "check",
    [
        check_messages_arrive_whole_and_in_order,
        check_channels_do_not_mix_and_both_ways_work,
        check_a_short_message_fills_the_front,
        check_a_long_message_is_a_bad_frame,
        check_a_large_send_waits_for_its_receive,
        check_a_cancelled_wait_leaves_the_operation,
        check_a_cancelled_wait_leaves_the_buffer,
        check_abort_fails_what_is_pending_at_both_ends,
    ],
    ids=lambda check: check.__name__.removeprefix("check_"),
)
class TestContract:
    async def test_inproc(self, check: Check) -> None:
        await check(listen_address("inproc"))

    async def test_ucx(self, check: Check) -> None:
        await check(listen_address("ucx"))


async def test_nobody_there() -> None:
    await check_nobody_there("inproc://", "inproc://nobody")
    await check_nobody_there("ucx://", "ucx://127.0.0.1:9")
    await check_nobody_there("ucx://", "ucx://no.such.host.invalid:9")


async def test_inproc_says_so() -> None:
    await check_it_says_what_it_travels_over("inproc://", {"inproc"})


async def test_ucx_uses_shared_memory_between_processes_of_one_host() -> None:
    await check_it_says_what_it_travels_over("ucx://127.0.0.1:0", {"posix", "sysv"})


async def test_a_name_is_listened_on_once() -> None:
    transport = open_transport("inproc://")
    listener = await transport.listen("inproc://once", lambda endpoint: None)
    with pytest.raises(FabricError, match="taken"):
        await transport.listen("inproc://once", lambda endpoint: None)
    listener.close()
    (await transport.listen("inproc://once", lambda endpoint: None)).close()


async def test_unknown_schemes_and_odd_addresses_are_refused() -> None:
    with pytest.raises(FabricError, match="rdma"):
        open_transport("rdma://host:1")
    for odd in ("ucx://", "ucx://host", "ucx://host:http", "ucx://:1", "ucx://host:65536"):
        with pytest.raises(FabricError):
            split_address(odd)
