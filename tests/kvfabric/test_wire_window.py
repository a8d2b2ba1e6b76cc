"""Which frame goes to the network next, and when, without a network."""

import asyncio
from dataclasses import dataclass
from typing import cast

import pytest

from kvfabric.errors import PeerLost, TransferAborted
from kvfabric.outgoing import Outgoing
from kvfabric.wire_window import WireWindow

QUANTUM = 100


@dataclass(eq=False)
class Transfer:
    """All that a window wants of one."""

    error: Exception | None = None


class Network:
    """Everything that was handed over, and the ends of it."""

    def __init__(self, size: int) -> None:
        self.gone: list[str] = []
        self.ends: list[asyncio.Future[None]] = []
        self.window = WireWindow(size, QUANTUM)
        self._loop = asyncio.get_running_loop()

    def add(self) -> Outgoing:
        one = cast(Outgoing, Transfer())
        self.window.add(one)
        return one

    def start(self, name: str, one: Outgoing, nbytes: int = QUANTUM) -> asyncio.Task[object]:
        def post() -> asyncio.Future[None]:
            self.gone.append(name)
            self.ends.append(self._loop.create_future())
            return self.ends[-1]

        return asyncio.create_task(self.window.post(one, nbytes, post))


async def turns_of_the_loop(count: int = 3) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_so_many_go_at_once_and_the_next_as_soon_as_one_has_ended() -> None:
    network = Network(2)
    one = network.add()
    posts = [network.start(f"{number}", one) for number in range(4)]
    await turns_of_the_loop()
    assert network.gone == ["0", "1"]
    network.ends[1].set_result(None)
    await asyncio.sleep(0)  # one turn: no task has to wake up for it
    await asyncio.sleep(0)
    assert network.gone == ["0", "1", "2"]
    network.ends[0].set_exception(PeerLost("broken"))
    network.ends[0].exception()
    await turns_of_the_loop()
    assert network.gone == ["0", "1", "2", "3"]
    assert [await post for post in posts] == network.ends


async def test_transfers_take_turns() -> None:
    network = Network(1)
    long, short = network.add(), network.add()
    for number in range(4):
        network.start(f"long {number}", long)
    await turns_of_the_loop()
    network.start("short", short)
    await turns_of_the_loop()
    for end in range(3):
        network.ends[end].set_result(None)
        await turns_of_the_loop()
    assert network.gone == ["long 0", "short", "long 1", "long 2"]


async def test_a_failed_transfer_hands_nothing_over_and_holds_nobody_up() -> None:
    network = Network(1)
    failing, other = network.add(), network.add()
    network.start("first", failing)
    await turns_of_the_loop()
    waits = [network.start("never", failing), network.start("never", failing)]
    await turns_of_the_loop()
    goes = network.start("other", other)
    await turns_of_the_loop()
    failing.error = TransferAborted("given up")
    network.ends[0].set_result(None)
    await turns_of_the_loop()
    assert network.gone == ["first", "other"]
    network.ends[1].set_result(None)
    assert await goes is network.ends[1]
    for wait in waits:
        with pytest.raises(TransferAborted):
            await asyncio.wait_for(wait, 5.0)
    with pytest.raises(TransferAborted):
        await network.start("never", failing)
    network.window.remove(failing)
    network.start("last", other)
    await turns_of_the_loop()
    assert network.gone[-1] == "last"


async def test_nobody_waits_for_a_network_that_keeps_a_message() -> None:
    """A broken connection whose transport never says what has become of it."""
    network = Network(1)
    one = network.add()
    network.start("kept", one)
    waits = [network.start("never", one) for _ in range(3)]
    await turns_of_the_loop()
    one.error = PeerLost("broken")
    network.window.close()
    for wait in waits:
        with pytest.raises(PeerLost):
            await asyncio.wait_for(wait, 5.0)
    network.window.remove(one)
    assert network.gone == ["kept"]
