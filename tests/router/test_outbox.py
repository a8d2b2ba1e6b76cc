"""One reader takes all that is there; nothing is lost, whoever leaves."""

import asyncio

from router.outbox import Outbox


async def test_what_has_come_is_taken_at_once_and_in_order() -> None:
    outbox: Outbox[int] = Outbox()
    for item in range(3):
        outbox.put(item)
    assert await outbox.take() == [0, 1, 2]
    assert outbox.take_now() == []
    asyncio.get_running_loop().call_soon(outbox.put, 3)
    assert await asyncio.wait_for(outbox.take(), 5) == [3]


async def test_a_reader_that_left_takes_nothing_with_it() -> None:
    outbox: Outbox[int] = Outbox()
    reading = asyncio.create_task(outbox.take())
    await asyncio.sleep(0)
    reading.cancel()
    outbox.put(1)
    await asyncio.wait({reading})
    assert reading.cancelled()
    assert await outbox.take() == [1]
