"""The first exchange on a connection: the two must mean the same by KV, and be who they think.

The connecting side says HELLO; the listening side answers WELCOME, or REFUSED with a reason and
breaks off. Both check: a process that takes over a port refuses a ticket of its predecessor, and
is refused by whoever holds one. On one host they also agree on the short way (kvfabric/direct.py).
"""

import asyncio
from dataclasses import replace

from kvfabric.control import (
    CONTROL_NBYTES,
    FINGERPRINT_NBYTES,
    Control,
    Hello,
    RefusalReason,
    Refused,
    Welcome,
    decode_control,
    encode_control,
)
from kvfabric.deadline import within
from kvfabric.direct_receiver import DirectReceiver
from kvfabric.direct_sender import DirectSender
from kvfabric.errors import BadFrame, HandshakeRefused
from kvfabric.facts import difference
from kvfabric.frame import WIRE_VERSION
from kvfabric.transport import Channel, Endpoint


async def greet(endpoint: Endpoint, hello: Hello, seconds: float) -> None:
    """The connecting side. Raises `HandshakeRefused`, `PeerLost`, `DeadlineExceeded`, `BadFrame`;
    the caller then aborts the endpoint."""
    assert len(hello.fingerprint) == FINGERPRINT_NBYTES
    direct = endpoint.direct if isinstance(endpoint.direct, DirectSender) else None
    if direct is not None:
        hello = replace(hello, invitation=direct.invite())
    answer_buffer = bytearray(CONTROL_NBYTES)
    answer_here = endpoint.recv(Channel.CONTROL, answer_buffer)
    endpoint.send(Channel.CONTROL, encode_control(hello))
    await within(seconds, answer_here, "the answer to HELLO")
    match decode_control(answer_buffer):
        case Welcome(fingerprint, generation, accepts=accepts):
            if fingerprint != hello.fingerprint or generation != hello.expected_generation:
                raise HandshakeRefused("another process than the ticket's welcomes us")
            if accepts and not hello.invitation:
                raise BadFrame("the peer accepts what it was not invited to")
            if direct is not None:
                (direct.begin if accepts else direct.withdraw)()
        case Refused(reason, facts):
            told = _named(reason, hello.facts, facts)
            raise HandshakeRefused(f"the peer refuses us for {told}")
        case other:
            raise BadFrame(f"{other} is no answer to HELLO")


async def answer(endpoint: Endpoint, welcome: Welcome, seconds: float) -> Hello:
    """The listening side; `welcome` says who we are. Raises like `greet`."""
    hello_buffer = bytearray(CONTROL_NBYTES)
    await within(seconds, endpoint.recv(Channel.CONTROL, hello_buffer), "HELLO")
    hello = decode_control(hello_buffer)
    if not isinstance(hello, Hello):
        raise BadFrame(f"{hello} instead of HELLO")
    reason = _refusal(hello, welcome)
    direct = endpoint.direct if isinstance(endpoint.direct, DirectReceiver) else None
    accepted = reason is None and direct is not None and direct.accept(hello.invitation)
    reply: Control = (
        Refused(reason, welcome.facts) if reason else replace(welcome, accepts=accepted)
    )
    await within(seconds, endpoint.send(Channel.CONTROL, encode_control(reply)), "our answer")
    if reason is not None:
        await _let_peer_read(endpoint, seconds)
        told = _named(reason, welcome.facts, hello.facts)
        raise HandshakeRefused(f"refused a peer for {told}")
    if accepted and direct is not None:
        direct.begin()
    return hello


def _named(reason: RefusalReason, ours: str, theirs: str) -> str:
    if reason is RefusalReason.FINGERPRINT:
        return f"KV of another meaning: {difference(ours, theirs)}"
    return f"another {reason.name.lower().replace('_', ' ')}"


def _refusal(hello: Hello, welcome: Welcome) -> RefusalReason | None:
    if hello.version != WIRE_VERSION:
        return RefusalReason.WIRE_VERSION
    if hello.expected_generation != welcome.generation:
        return RefusalReason.GENERATION
    if hello.fingerprint != welcome.fingerprint:
        return RefusalReason.FINGERPRINT
    return None


async def _let_peer_read(endpoint: Endpoint, seconds: float) -> None:
    """Breaking a connection may overtake the last small message on it; so the peer breaks it."""
    never_comes = endpoint.recv(Channel.CONTROL, bytearray(CONTROL_NBYTES))
    await asyncio.wait((never_comes,), timeout=seconds)
