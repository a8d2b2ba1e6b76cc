"""Processes that mean different things by KV part with a sentence that says what differs."""

import asyncio

import pytest

from kvfabric.control import (
    FACTS_NBYTES,
    Hello,
    RefusalReason,
    Refused,
    Welcome,
    decode_control,
    encode_control,
)
from kvfabric.errors import HandshakeRefused
from kvfabric.facts import difference
from kvfabric.handshake import answer, greet
from kvfabric.transport import Endpoint, open_transport
from tests.kvfabric.rig import (
    SECONDS,
    Source,
    make_ticket,
    open_nodes,
    random_kv,
    ship_all,
    ship_error,
)

OURS = "dtype=float32;layers=30;KV heads=3;weights=aa"
THEIRS = "dtype=bfloat16;layers=30;KV heads=8;weights=aa"
TOLD = "dtype is float32 here and bfloat16 there, KV heads is 3 here and 8 there"


def test_what_differs_is_named_and_the_rest_is_not() -> None:
    assert difference(OURS, THEIRS) == TOLD


@pytest.mark.parametrize("theirs", ["", "nonsense", "color=red"])
def test_where_nothing_comparable_is_told(theirs: str) -> None:
    assert "fingerprint" in difference(OURS, theirs)


def test_where_all_that_is_told_is_the_same() -> None:
    assert difference(OURS, OURS) == (
        "its fingerprint, though dtype, layers, KV heads, weights are the same"
    )


def test_a_stranger_s_text_cannot_write_into_our_log() -> None:
    assert difference("a=1", "a=\x1b[2J\n2") == "a is 1 here and ?[2J?2 there"


@pytest.mark.parametrize("text", ["", "a=1", "ü" * FACTS_NBYTES, "x\n;=="])
def test_control_messages_carry_facts_as_far_as_there_is_room(text: str) -> None:
    for message in (
        Hello(b"f" * 32, 1, 2, facts=text),
        Welcome(b"f" * 32, 1, text),
        Refused(RefusalReason.FINGERPRINT, text),
    ):
        back = decode_control(encode_control(message))
        assert type(back) is type(message)
        assert text.startswith(back.facts)
        if len(text.encode()) <= FACTS_NBYTES:
            assert back == message


async def test_the_handshake_says_what_differs_on_both_sides() -> None:
    transport, accepted = open_transport("inproc://"), asyncio.Queue[Endpoint]()
    listener = await transport.listen("inproc://", accepted.put_nowait)
    near = await transport.connect(listener.address, SECONDS)
    far = await accepted.get()
    hello = Hello(b"f" * 32, 1, 2, facts=OURS)
    answering = asyncio.create_task(answer(far, Welcome(b"g" * 32, 2, THEIRS), SECONDS))
    with pytest.raises(HandshakeRefused, match=TOLD):
        await greet(near, hello, SECONDS)
    near.abort()
    with pytest.raises(HandshakeRefused, match="dtype is bfloat16 here and float32 there"):
        await answering
    far.abort()
    listener.close()
    await transport.close()


async def test_a_ticket_for_other_kv_is_refused_with_what_differs() -> None:
    async with open_nodes("inproc", count=1, facts=OURS) as (prefill,):
        ticket = make_ticket(prefill, 64, fingerprint=b"g" * 32, facts=THEIRS)
        error = await ship_error(ship_all(prefill, ticket, Source(random_kv(64))))
        assert isinstance(error, HandshakeRefused)
        assert TOLD in str(error)
