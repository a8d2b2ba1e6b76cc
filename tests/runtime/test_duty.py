"""Roles that are taken from a worker, and the calls that run for them meanwhile."""

import asyncio

import pytest

from runtime.call import Draining
from runtime.duty import Duty


async def run(duty: Duty, role: str, seconds: float) -> str:
    async with duty.call(role):
        await asyncio.sleep(seconds)
    return "done"


async def test_what_is_not_served_is_refused() -> None:
    duty = Duty("w", ["decode"])
    with pytest.raises(Draining, match="w does not serve prefill; it serves decode"):
        await run(duty, "prefill", 0)
    assert await run(duty, "decode", 0) == "done"
    duty.assign([], 0)
    with pytest.raises(Draining, match="nothing: it drains"):
        await run(duty, "decode", 0)


async def test_calls_have_the_grace_and_no_more() -> None:
    changes = []
    duty = Duty("w", ["decode", "prefill"])
    duty.on_change = lambda: changes.append(duty.roles)
    names = [("decode", 0.02), ("decode", 60), ("prefill", 0.15)]
    short, long, other = (asyncio.create_task(run(duty, *name)) for name in names)
    await asyncio.sleep(0)
    duty.assign(["prefill"], 0.1)
    assert duty.num_leaving == 2
    assert await short == "done"
    with pytest.raises(Draining):
        await long
    assert await other == "done"
    assert duty.num_leaving == 0
    assert changes == [{"prefill"}]


async def test_a_role_that_comes_back_keeps_its_calls() -> None:
    duty = Duty("w", ["decode"])
    call = asyncio.create_task(run(duty, "decode", 0.1))
    await asyncio.sleep(0)
    duty.assign(["prefill"], 0.02)
    duty.assign(["decode"], 0)
    assert await call == "done"


async def test_a_later_word_shortens_the_grace() -> None:
    duty = Duty("w", ["decode"])
    call = asyncio.create_task(run(duty, "decode", 60))
    await asyncio.sleep(0)
    duty.assign([], 60)
    duty.assign([], 0)
    with pytest.raises(Draining):
        await call


async def test_other_ends_of_a_call_are_its_own() -> None:
    duty = Duty("w", ["decode"])

    async def too_late() -> None:
        async with duty.call("decode"), asyncio.timeout(0.001):
            await asyncio.sleep(1)

    with pytest.raises(TimeoutError):
        await too_late()
    call = asyncio.create_task(run(duty, "decode", 60))
    await asyncio.sleep(0)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    duty.assign([], 0)
    assert duty.num_leaving == 0
