"""Two real processes over UCX: killed, stopped, restarted, disturbed, and ended."""

import asyncio
import os
import secrets
import signal
import socket
import time
from typing import Any

import pytest

from tests.kvfabric.peer_child import Child, child, expect, transfer

PROMPT_S = 0.5
"""Generous for two busy cores; the network itself notices in 10 ms."""


async def begin(prefill: Child, decode: Child, num_tokens: int = 640) -> None:
    """A transfer is under way and will not end by itself: the rest is never computed."""
    ticket = await expect(decode, num_tokens)
    prefill.tell(do="ship", computed=num_tokens // 2, **ticket)
    try:
        await decode.hear("installed")
    except AssertionError as silence:
        shipped = await prefill.hear("shipped")
        raise AssertionError(f"of {shipped} came {silence}") from None


async def within_moments(child: Child, key: str, since: float) -> dict[str, Any]:
    event = await child.hear(key)
    assert time.monotonic() - since < PROMPT_S
    return event


async def test_bytes_arrive_over_shared_memory_and_processes_end_well() -> None:
    async with child(1) as prefill, child(2) as decode:
        for _ in range(3):
            await transfer(prefill, decode)
        stats = await prefill.idle(endpoints=1)
        assert {"posix", "sysv"} & set(stats["transports"])
        assert "cma" in stats["transports"], "read where they lie"
        await prefill.end()
        await decode.idle(endpoints=0)
        await decode.end()


async def test_bytes_arrive_by_ucx_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "^cma")
    async with child(1) as prefill, child(2) as decode:
        await transfer(prefill, decode)
        stats = await prefill.idle(endpoints=1)
        assert {"posix", "sysv"} & set(stats["transports"])
        assert "cma" not in stats["transports"]


async def test_a_killed_sender_is_noticed_at_once() -> None:
    async with child(1) as prefill, child(2) as decode:
        await begin(prefill, decode)
        killed = time.monotonic()
        prefill.process.kill()
        ended = await within_moments(decode, "ended", killed)
        assert ended["error"] == "PeerLost"
        await decode.idle(endpoints=0)
        async with child(3) as another:
            await transfer(another, decode)
        await decode.end()


async def test_a_killed_receiver_is_noticed_and_its_successor_served() -> None:
    async with child(1) as prefill:
        async with child(2) as decode:
            port = await decode.port()
            await begin(prefill, decode)
            killed = time.monotonic()
            decode.process.kill()
            shipped = await within_moments(prefill, "shipped", killed)
            assert shipped["error"] == "PeerLost"
            await prefill.idle(endpoints=0)
        async with child(3, port) as successor:
            await transfer(prefill, successor)
            ticket = await expect(successor, 64)  # a ticket of the dead one, to its successor
            prefill.tell(do="ship", computed=64, **{**ticket, "generation": 2})
            assert (await prefill.hear("shipped"))["error"] == "HandshakeRefused"
            await transfer(prefill, successor)
        await prefill.end()


@pytest.mark.parametrize("stopped", ["prefill", "decode"])
async def test_a_stopped_peer_meets_the_deadline(stopped: str) -> None:
    async with child(1, deadline_s=1.0) as prefill, child(2, deadline_s=1.0) as decode:
        ticket = await expect(decode, 6400, install_s=0.02)
        prefill.tell(do="ship", computed=6400, **ticket)
        await decode.hear("installed")
        victim, witness, key = {
            "prefill": (prefill, decode, "ended"),
            "decode": (decode, prefill, "shipped"),
        }[stopped]
        os.kill(victim.process.pid, signal.SIGSTOP)
        event = await witness.hear(key)
        assert event["error"] == "DeadlineExceeded"
        await witness.idle(endpoints=0)
        os.kill(victim.process.pid, signal.SIGCONT)
        await victim.idle(endpoints=0)  # it hears that it was given up, before it is used again
        await transfer(prefill, decode)
        await prefill.end()
        await decode.end()


async def test_junk_on_the_listening_port_disturbs_nobody() -> None:
    async with child(1) as prefill, child(2) as decode:
        await transfer(prefill, decode)
        port = await decode.port()
        for junk in (b"GET / HTTP/1.1\r\n\r\n", secrets.token_bytes(5000), bytes(300), b""):
            with socket.create_connection(("127.0.0.1", port)) as connection:
                connection.sendall(junk)
                await asyncio.sleep(0.05)
        async with child(3) as newcomer:
            await transfer(newcomer, decode)
            await transfer(prefill, decode)
            await newcomer.end()
        await prefill.end()
        await decode.idle(endpoints=0)
        await decode.end()


async def test_a_process_ends_at_once() -> None:
    """UCX's notifier looks once a second whether it shall end; nobody waits for that."""
    seconds = []
    for generation in (1, 2, 3):
        async with child(generation) as one:
            await one.address()
            began = time.monotonic()
            await one.end()
            seconds.append(time.monotonic() - began)
    assert min(seconds) < 0.7
