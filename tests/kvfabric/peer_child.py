"""A peer process, started and spoken to by a test; and whole transfers from one to another."""

import asyncio
import json
import os
import secrets
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from tests.kvfabric.peer_process import digest
from tests.kvfabric.rig import SECONDS, random_kv

START_S = 60.0
"""For a process to start, however busy the machine is."""


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
async def child(
    generation: int, port: int = 0, deadline_s: float = 3.0, ucx_log: str = "error"
) -> AsyncIterator[Child]:
    """`deadline_s`: of its fabric; short ones are for tests of deadlines alone."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.kvfabric.peer_process"),
        *(str(generation), str(port), str(deadline_s)),
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "UCX_LOG_LEVEL": ucx_log},
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
