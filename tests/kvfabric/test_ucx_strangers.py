"""Strangers at the port where UCX listens: they cost nothing for long, and peers never notice."""

import asyncio
import os
import resource
import socket
import struct
import time
from contextlib import ExitStack, suppress
from pathlib import Path

from kvfabric.strangers import MAX_CALLERS
from tests.kvfabric.peer_child import Child, child, transfer

LOOKED_S = 15.0
"""A few looks, on a busy machine."""
FULL = 2080
"""What UCX reads of a connection before it knows what it is."""


def cpu_s(pid: int) -> float:
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def num_files(one: Child) -> int:
    return len(os.listdir(f"/proc/{one.process.pid}/fd"))


async def share_of_a_core(one: Child, seconds: float = 0.4) -> float:
    before, began = cpu_s(one.process.pid), time.monotonic()
    await asyncio.sleep(seconds)
    return (cpu_s(one.process.pid) - before) / (time.monotonic() - began)


def caller(port: int, num_sent: int) -> socket.socket:
    """Its bytes begin as no message of UCX's does."""
    one = socket.create_connection(("127.0.0.1", port), 2)
    one.sendall(b"\xff" * num_sent)
    return one


async def test_who_says_too_much_costs_little_for_seconds_and_then_nothing() -> None:
    async with child(1) as prefill, child(2) as decode:
        await transfer(prefill, decode)
        port, files = await decode.port(), num_files(decode)
        with ExitStack() as staying:
            for num_sent in (FULL, FULL + 1, 70_000):
                caller(port, num_sent).close()
                halves = staying.enter_context(caller(port, num_sent))
                halves.shutdown(socket.SHUT_WR)
            for num_sent in (FULL + 1, 70_000):
                staying.enter_context(caller(port, num_sent))
                resets = caller(port, num_sent)
                resets.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                resets.close()
            slow = staying.enter_context(caller(port, FULL))
            async with asyncio.timeout(LOOKED_S):
                while await share_of_a_core(decode) > 0.1 or num_files(decode) > files:
                    with suppress(ConnectionError):
                        slow.send(b"still here")
                    await transfer(prefill, decode)
            async with child(3) as newcomer:
                await transfer(newcomer, decode)
                told = await decode.idle(endpoints=2)
                assert told["errors"] == {"Stranger": 9}, "three left, three half, three stay"
        await prefill.idle(endpoints=1)


async def test_a_crowd_that_says_nothing_keeps_nobody_out_for_long() -> None:
    """More than the process may have files: UCX then accepts nobody, and is busy failing to."""
    quiet = child(2, ucx_log="fatal")
    async with child(1) as prefill, quiet as decode, child(3) as newcomer:
        await transfer(prefill, decode)
        await newcomer.address()
        port, most = await decode.port(), num_files(decode) + MAX_CALLERS
        resource.prlimit(decode.process.pid, resource.RLIMIT_NOFILE, (256, 256))
        with ExitStack() as staying:
            for _ in range(400):
                staying.enter_context(caller(port, 0))
            await transfer(prefill, decode)
            async with asyncio.timeout(LOOKED_S):
                while await share_of_a_core(decode) > 0.1 or num_files(decode) > most:
                    pass
            await transfer(newcomer, decode)
        await newcomer.end()
        await prefill.end()
        await decode.end()
