import asyncio

import pytest

from kvfabric.frame import message_nbytes
from kvfabric.slots import Slot, SlotPool, cut_slab, slot_stride


def pool(count: int) -> SlotPool:
    return SlotPool([memoryview(bytearray(8)) for _ in range(count)])


async def waiting(pool: SlotPool, peer: str) -> asyncio.Task[Slot]:
    task = asyncio.create_task(pool.acquire(peer))
    await asyncio.sleep(0)
    return task


def test_the_slab_is_cut_into_disjoint_slots() -> None:
    staging = bytearray(5 * slot_stride(1000))
    send, recv = cut_slab(memoryview(staging), payload_nbytes=1000, send_slots=2, recv_slots=3)
    assert (send.num_slots, recv.num_slots) == (2, 3)
    for i, message in enumerate([*send._free, *recv._free]):
        assert len(message) == message_nbytes(1000)
        message[:] = bytes([i + 1]) * len(message)
    assert sorted(set(staging)) == [0, 1, 2, 3, 4, 5]
    assert all(staging.count(i) == message_nbytes(1000) for i in range(1, 6))


async def test_nobody_holds_more_than_half() -> None:
    slots = pool(4)
    first = [await slots.acquire("a"), await slots.acquire("a")]
    third = await waiting(slots, "a")
    other = await slots.acquire("b")  # passes the one at its cap
    assert not third.done()
    slots.release(first.pop())
    for slot in (await third, first.pop(), other):
        slots.release(slot)
    assert slots.num_used == 0


async def test_one_slot_is_enough_for_each_in_turn() -> None:
    slots = pool(1)
    held = await slots.acquire("a")
    waiters = [await waiting(slots, peer) for peer in "bcb"]
    for waiter in waiters:
        slots.release(held)
        held = await waiter
        assert [w.done() for w in waiters].count(True) == waiters.index(waiter) + 1
    slots.release(held)
    assert slots.num_used == 0


async def test_a_cancelled_wait_leaves_nothing_behind() -> None:
    slots = pool(1)
    held = await slots.acquire("a")
    gone, served = await waiting(slots, "b"), await waiting(slots, "c")
    gone.cancel()
    slots.release(held)
    slots.release(await served)
    with pytest.raises(asyncio.CancelledError):
        await gone
    assert slots.num_used == 0


async def test_a_wait_cancelled_just_when_granted_gives_the_slot_back() -> None:
    slots = pool(1)
    held = await slots.acquire("a")
    waiter = await waiting(slots, "b")
    slots.release(held)  # granted now, but the waiter has not run yet
    waiter.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiter
    assert slots.num_used == 0


async def test_what_is_lent_has_an_owner_and_adds_up() -> None:
    slots = pool(4)
    mine, other = await slots.acquire("a"), await slots.acquire("b")
    mine.owner = "request"
    assert slots.lent == {mine, other}
    assert slots.is_balanced
    assert 0 < mine.since_ns <= other.since_ns
    slots.release(mine)
    assert slots.lent == {other}
    with pytest.raises(AssertionError, match="twice"):
        slots.release(mine)
    assert slots.is_balanced
    slots._free.pop()
    assert not slots.is_balanced, "one is lost"
    slots._free += [other.message, other.message]
    assert not slots.is_balanced, "one is lent and free"
