"""The clock of UCX's progress thread: it ticks while something is under way, and only then."""

import asyncio

from kvfabric.ucx_clock import Clock

PATIENCE_S = 5.0


class Bell:
    """Counts wake-ups; `rings` waits for so many more."""

    def __init__(self) -> None:
        self.count = 0
        self._rang = asyncio.Event()

    def __call__(self) -> None:
        self.count += 1
        self._rang.set()

    async def rings(self, times: int) -> None:
        async with asyncio.timeout(PATIENCE_S):
            for _ in range(times):
                self._rang.clear()
                await self._rang.wait()

    async def falls_silent(self) -> None:
        count = -1
        async with asyncio.timeout(PATIENCE_S):
            while count != self.count:
                count = self.count
                await asyncio.sleep(0.03)  # many ticks


async def test_it_ticks_until_the_last_one_has_ended() -> None:
    bell = Bell()
    clock = Clock(bell)
    clock.begin()
    clock.begin()
    await bell.rings(3)
    clock.end()
    await asyncio.sleep(0.15)  # longer than the tail of whatever has ended
    await bell.rings(3)
    clock.end()
    await bell.falls_silent()
    clock.wind()
    await bell.rings(1)
    await bell.falls_silent()


async def test_it_ticks_less_often_the_longer_nothing_happens() -> None:
    bell = Bell()
    clock = Clock(bell)
    clock.begin()
    await asyncio.sleep(0.1)
    assert bell.count < 50  # not a hundred
    count = bell.count
    for _ in range(20):
        clock.wind()
        await bell.rings(1)
    assert bell.count >= count + 20
    clock.end()
    await bell.falls_silent()


async def test_stopped_it_wakes_nobody() -> None:
    bell = Bell()
    clock = Clock(bell)
    clock.begin()
    await bell.rings(1)
    clock.stop()
    count = bell.count
    await asyncio.sleep(0.02)
    assert bell.count == count
