"""Two real processes over UCX: killed, stopped, restarted, disturbed, and ended."""

import asyncio
import json
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.kvfabric.peer_process import digest
from tests.kvfabric.rig import SECONDS, random_kv

START_S = 60.0
"""For a process to start, however busy the machine is."""
PROMPT_S = 0.5
"""Generous for two busy cores; the network itself notices in 10 ms."""


class Child:
    """A peer process, by its stdin and stdout."""

    def __init__(self, process: asyncio.subprocess.Process, generation: int) -> None:
        self.process = process
        self.generation = generation
        self._address = ""
        self._passed_over: list[dict[str, Any]] = []

    async def address(self) -> str:
        """Known when the process has started."""
        if not self._address:
            self._address = (await self.hear("address", within_s=START_S))["address"]
        return self._address

    async def port(self) -> int:
        return int((await self.address()).rpartition(":")[2])

    def tell(self, **command: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command).encode() + b"\n")

    async def hear(
        self, key: str, value: str | None = None, within_s: float = SECONDS
    ) -> dict[str, Any]:
        """The next event that has this key (and value)."""
        assert self.process.stdout is not None
        while True:
            try:
                line = await asyncio.wait_for(self.process.stdout.readline(), within_s)
            except TimeoutError:
                raise AssertionError(f"no {key!r}, but {self._passed_over[-4:]}") from None
            assert line, "the peer process ended"
            event: dict[str, Any] = json.loads(line)
            if event.get(key) is not None and value in (None, event[key]):
                return event
            self._passed_over.append(event)

    async def idle(self, endpoints: int) -> dict[str, Any]:
        """Asserts that nothing is held; waits for slots whose operation is just ending."""
        async with asyncio.timeout(SECONDS):
            while True:
                self.tell(do="stats")
                stats = await self.hear("slots")
                if (stats["slots"], stats["transfers"], stats["endpoints"]) == (0, 0, endpoints):
                    return stats

    async def end(self) -> None:
        """Closes stdin: the process must end by itself, and well."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        assert await asyncio.wait_for(self.process.wait(), SECONDS) == 0


@asynccontextmanager
async def child(generation: int, port: int = 0, deadline_s: float = 3.0) -> AsyncIterator[Child]:
    """`deadline_s`: of its fabric; short ones are for tests of deadlines alone."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.kvfabric.peer_process"),
        *(str(generation), str(port), str(deadline_s)),
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    one = Child(process, generation)
    try:
        yield one
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        assert process.stdin is not None
        process.stdin.close()


async def expect(decode: Child, num_tokens: int, install_s: float = 0.0) -> dict[str, Any]:
    """What `ship` takes, once the decode process expects it."""
    address, transfer_id = await decode.address(), secrets.token_hex(16)
    decode.tell(do="expect", transfer_id=transfer_id, num_tokens=num_tokens, install_s=install_s)
    await decode.hear("expected")
    return {
        "transfer_id": transfer_id,
        "address": address,
        "generation": decode.generation,
        "num_tokens": num_tokens,
    }


async def transfer(prefill: Child, decode: Child, num_tokens: int = 640) -> None:
    """A whole transfer goes through."""
    ticket = await expect(decode, num_tokens)
    prefill.tell(do="ship", computed=num_tokens, **ticket)
    assert (await prefill.hear("shipped", ticket["transfer_id"]))["error"] is None
    ended = await decode.hear("ended", ticket["transfer_id"])
    assert ended["error"] is None
    assert ended["digest"] == digest(random_kv(num_tokens))


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
        await prefill.end()
        await decode.idle(endpoints=0)
        await decode.end()


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
