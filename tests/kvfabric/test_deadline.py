"""Deadlines and alarms, on a loop's own clock."""

import asyncio
import gc
import weakref

import pytest

from kvfabric.deadline import Alarm, Deadline
from kvfabric.errors import DeadlineExceeded

PATIENCE_S = 5.0


class _HasAlarm:
    def __init__(self) -> None:
        self.alarm = Alarm(self.late)

    def late(self) -> None:
        pass


class TestAlarm:
    async def test_it_rings_once(self) -> None:
        rang = asyncio.Event()
        alarm = Alarm(rang.set)
        for _ in range(2):
            alarm.set(0.01)
            await asyncio.wait_for(rang.wait(), PATIENCE_S)
            rang.clear()
            await asyncio.sleep(0.03)
            assert not rang.is_set()

    async def test_put_off_it_is_silent_until_the_last_time(self) -> None:
        loop, rang = asyncio.get_running_loop(), asyncio.Event()
        alarm = Alarm(rang.set)
        for _ in range(20):
            alarm.set(0.5)
            await asyncio.sleep(0.03)  # longer than it was set for, together
            assert not rang.is_set()
        set_at = loop.time()
        alarm.set(0.5)
        await asyncio.wait_for(rang.wait(), PATIENCE_S)
        assert loop.time() >= set_at + 0.5

    async def test_it_can_be_set_earlier(self) -> None:
        rang = asyncio.Event()
        alarm = Alarm(rang.set)
        alarm.set(60)
        alarm.set(0.01)
        await asyncio.wait_for(rang.wait(), PATIENCE_S)

    async def test_stopped_it_is_silent_and_can_be_set_again(self) -> None:
        rang = asyncio.Event()
        alarm = Alarm(rang.set)
        alarm.set(0.01)
        alarm.stop()
        await asyncio.sleep(0.03)
        assert not rang.is_set()
        alarm.set(0.01)
        await asyncio.wait_for(rang.wait(), PATIENCE_S)

    async def test_cancelled_it_is_silent_for_good(self) -> None:
        rang = asyncio.Event()
        alarm = Alarm(rang.set)
        alarm.set(0.01)
        alarm.cancel()
        alarm.set(0.01)
        await asyncio.sleep(0.03)
        assert not rang.is_set()

    async def test_cancelled_it_holds_nobody(self) -> None:
        """Who has one is told by it: a circle, and thousands of those a minute."""
        one = _HasAlarm()
        seen = weakref.ref(one)
        gc.disable()
        try:
            one.alarm.set(60)
            one.alarm.cancel()
            del one
            assert seen() is None
        finally:
            gc.enable()


class TestDeadline:
    async def test_each_has_its_time(self) -> None:
        deadline, loop = Deadline(0.6), asyncio.get_running_loop()
        late, done = loop.create_future(), loop.create_future()
        waiting = asyncio.create_task(deadline.within(late, "the first"))
        await asyncio.sleep(0.3)
        other = asyncio.create_task(deadline.within(done, "the second"))
        with pytest.raises(DeadlineExceeded, match="the first took longer"):
            await waiting
        assert not late.done()
        assert not other.done()
        done.set_result(7)
        assert await other == 7
