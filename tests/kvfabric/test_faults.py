"""The fault injector, and the fabric under each of its faults: every transfer ends once, installs
nothing wrong, and leaves nothing behind."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvfabric.control import FACTS_NBYTES, Hello, Offer, Paced, encode_control
from kvfabric.errors import FabricError, PeerLost
from kvfabric.faults import KINDS, Fault, FaultPlan, kind_of
from kvfabric.node import Node
from kvfabric.outgoing import Outgoing
from kvfabric.transport import Channel, Endpoint, open_transport
from tests.kvfabric.rig import (
    BLOCK_SIZE,
    SECONDS,
    Sink,
    Source,
    expected,
    open_nodes,
    random_kv,
    ship_all,
    shipped,
)

pytestmark = pytest.mark.usefixtures("ucx_stays_up")
on_module_loop = pytest.mark.asyncio(loop_scope="module")

NUM_TOKENS = 256  # four frames
QUICK: dict[str, Any] = {
    "connect_timeout_s": 0.3,
    "send_timeout_s": 0.3,
    "first_frame_timeout_s": 0.6,
    "transfer_timeout_s": 0.3,
}
HARMLESS = {Fault.DELAY, Fault.REORDER}
"""Later, or in another order: nothing is lost by it."""


def test_a_plan_in_a_file_is_what_the_file_says_now(tmp_path: Path) -> None:
    file = tmp_path / "plan"
    plan = FaultPlan.parse(f"@{file}")
    assert plan.draw("kv") is None, "there is none yet"
    for fault in ("drop", "kill"):
        written = tmp_path / fault
        written.write_text(f"kv:{fault}:1:times=1,seed=7")
        written.rename(file)
        rule = plan.draw("kv")
        assert rule is not None
        assert rule.fault == fault
        assert plan.draw("kv") is None, "once only, however often it is looked"
    file.write_text("")
    assert plan.draw("kv") is None
    assert plan.injected == {"kv:drop": 1, "kv:kill": 1}


def test_a_plan_is_parsed() -> None:
    plan = FaultPlan.parse("kv:drop:0.25,*:delay:1:seconds=0.2:times=1,seed=7")
    assert plan.draw("hello") is not None
    assert plan.draw("hello") is None, "once only"
    hits = sum(plan.draw("kv") is not None for _ in range(1000))
    assert 200 < hits < 300
    assert plan.injected == {"hello:delay": 1, "kv:drop": hits}
    later = FaultPlan.parse("kv:drop:1:times=1:after=2")
    assert [later.draw("kv") is not None for _ in range(4)] == [False, False, True, False]
    again = FaultPlan.parse("kv:drop:0.25,seed=7")
    other = FaultPlan.parse("kv:drop:0.25,seed=7")
    draws = [[p.draw("kv") is None for _ in range(50)] for p in (again, other)]
    assert draws[0] == draws[1]


@pytest.mark.parametrize(
    "text",
    ["kv", "kv:drop", "frame:drop:1", "kv:burn:1", "kv:drop:often", "kv:drop:1:2", "seed=x"],
)
def test_a_plan_that_says_nothing_clear_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        FaultPlan.parse(text)


@on_module_loop
async def test_a_node_refuses_a_bad_plan() -> None:
    with pytest.raises(ValueError, match="frame"):
        async with open_nodes("inproc", faults="frame:drop:1"):
            pass


async def pair(faults: str) -> tuple[Endpoint, Endpoint, FaultPlan]:
    """A harmed sender and whom it sends to."""
    plan = FaultPlan.parse(faults)
    here, there = open_transport("inproc://", plan), open_transport("inproc://")
    accepted: asyncio.Queue[Endpoint] = asyncio.Queue()
    listener = await there.listen("inproc://", accepted.put_nowait)
    sender = await here.connect(listener.address, SECONDS)
    receiver = await accepted.get()
    listener.close()
    return sender, receiver, plan


async def heard(receiver: Endpoint, count: int) -> list[int]:
    """What the next OFFERs say; of those that come within the tenth of a second."""
    numbers = []
    for _ in range(count):
        buffer = bytearray(len(encode_control(Offer(0))))
        received = receiver.recv(Channel.CONTROL, buffer)
        await asyncio.wait((received,), timeout=0.1)
        if not received.done():
            break
        numbers.append(int.from_bytes(buffer[8:16], "little"))
    return numbers


@pytest.mark.parametrize(
    ("fault", "expected_numbers"),
    [
        (Fault.DROP, [2, 3]),
        (Fault.DELAY, [1, 2, 3]),
        (Fault.DUPLICATE, [1, 1, 2, 3]),
        (Fault.REORDER, [2, 1, 3]),
        (Fault.STALL, []),
    ],
)
@on_module_loop
async def test_what_a_fault_makes_of_three_messages(
    fault: Fault, expected_numbers: list[int]
) -> None:
    sender, receiver, plan = await pair(f"offer:{fault}:1:times=1:seconds=0.01")
    for number in (1, 2, 3):
        sender.send(Channel.CONTROL, encode_control(Offer(number)))
    assert await heard(receiver, 4) == expected_numbers
    assert plan.injected == {f"offer:{fault}": 1}
    sender.abort()


@on_module_loop
async def test_a_lone_message_is_not_held_for_ever_by_reorder() -> None:
    sender, receiver, _ = await pair("offer:reorder:1:times=1:seconds=0.01")
    sender.send(Channel.CONTROL, encode_control(Offer(1)))
    assert await heard(receiver, 1) == [1]
    sender.abort()


@on_module_loop
async def test_corrupt_and_truncate_change_the_message() -> None:
    for fault in (Fault.CORRUPT, Fault.TRUNCATE):
        sender, receiver, _ = await pair(f"hello:{fault}:1,seed=3")
        message = encode_control(Hello(b"f" * 32, 1, 2, facts="x" * FACTS_NBYTES))
        sent = sender.send(Channel.CONTROL, message)
        buffer = bytearray(len(message))
        await receiver.recv(Channel.CONTROL, buffer)
        await sent
        assert bytes(buffer) != message
        sender.abort()


@on_module_loop
async def test_abort_and_kill_fail_what_is_held_up() -> None:
    sender, _, _ = await pair("offer:stall:1")
    stalled = sender.send(Channel.CONTROL, encode_control(Offer(1)))
    behind = sender.send(Channel.CONTROL, encode_control(Offer(2)))
    await asyncio.sleep(0)
    sender.abort()
    killed, receiver, _ = await pair("offer:kill:1")
    dead = killed.send(Channel.CONTROL, encode_control(Offer(1)))
    for future in (stalled, behind, dead, receiver.recv(Channel.CONTROL, bytearray(64))):
        with pytest.raises(PeerLost):
            await asyncio.wait_for(future, SECONDS)


def test_kinds_are_those_of_our_messages() -> None:
    assert kind_of(Channel.CONTROL, encode_control(Offer(1))) == "offer"
    assert kind_of(Channel.CONTROL, encode_control(Paced(True))) == "paced"
    assert len(set(KINDS)) == 10


async def end_of(sink: Sink) -> FabricError | None:
    """None: committed. Raises TimeoutError if the transfer has no end."""
    first, _ = await asyncio.wait_for(asyncio.shield(sink.ended), SECONDS)
    return first if isinstance(first, FabricError) else None


async def relay(
    prefill: Node, decode: Node, count: int
) -> tuple[list[FabricError | None], list[Outgoing]]:
    """Ships `count` transfers at once. Whatever is said to be installed is what was sent."""
    kvs = [random_kv(NUM_TOKENS, seed) for seed in range(count)]
    ends = [expected(decode, NUM_TOKENS) for _ in kvs]
    outgoings = [
        ship_all(prefill, ticket, Source(kv)) for (ticket, _), kv in zip(ends, kvs, strict=True)
    ]
    errors = [await end_of(sink) for _, sink in ends]
    for (_, sink), kv in zip(ends, kvs, strict=True):
        first, second = await sink.ended
        good = NUM_TOKENS if isinstance(first, bytes) else second
        assert isinstance(good, int)
        assert good % BLOCK_SIZE == 0
        assert np.array_equal(sink.kv[:, :, :good], kv[:, :, :good])
    return errors, outgoings


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fault", Fault)
@on_module_loop
async def test_one_fault_costs_at_most_the_transfers_of_its_connection(
    kind: str, fault: Fault
) -> None:
    """And the next connection is as good as new."""
    faults = f"{kind}:{fault}:1:times=1:seconds=0.02,seed=5"
    async with open_nodes("inproc", faults=faults, **QUICK) as (prefill, decode):
        errors, outgoings = await relay(prefill, decode, 2)
        if fault in HARMLESS:
            assert errors == [None, None]
        for outgoing in outgoings:
            await asyncio.wait((asyncio.wrap_future(outgoing.done),), timeout=SECONDS)
            assert outgoing.finished, "the sender hears of the end too"
        deadline = asyncio.get_running_loop().time() + SECONDS
        while (await relay(prefill, decode, 1))[0] != [None]:  # each node harms once
            assert asyncio.get_running_loop().time() < deadline


@settings(
    max_examples=12,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    rules=st.lists(
        st.tuples(
            st.sampled_from([*KINDS, "*"]),
            st.sampled_from(list(Fault)),
            st.floats(0.01, 0.3),
        ),
        min_size=1,
        max_size=4,
    ),
    seed=st.integers(0, 1 << 16),
)
def test_any_faults_end_every_transfer(rules: list[tuple[str, Fault, float]], seed: int) -> None:
    text = ",".join(f"{kind}:{fault}:{share:.3f}:seconds=0.01" for kind, fault, share in rules)

    async def run() -> None:
        async with open_nodes("inproc", faults=f"{text},seed={seed}", **QUICK) as nodes:
            await relay(nodes[0], nodes[1], count=4)

    asyncio.run(run())


@on_module_loop
async def test_over_ucx_a_lost_frame_costs_a_transfer_and_not_the_peer() -> None:
    faults = "kv:corrupt:1:times=1,commit:kill:1:times=1"
    async with open_nodes("ucx", faults=faults, **QUICK) as (prefill, decode):
        errors, outgoings = await relay(prefill, decode, 1)
        assert errors != [None]
        while errors != [None]:
            errors, outgoings = await relay(prefill, decode, 1)
        await shipped(outgoings[0])
        assert prefill.stats().injected_faults == {"kv:corrupt": 1, "commit:kill": 1}
