"""Keeps a set of processes running. Knows nothing of what they are.

1. `start()`: each in a process group of its own, output to its log, tied to our life (`child`).
2. `first_end()`: the first one that ends; while the cluster comes up, that is a failure.
3. `keep()`: whoever ends is started again, after a pause that grows while it keeps dying.
4. `stop()`: SIGTERM to all; SIGKILL to those that are still there after a while.

`on_change` is called when the set of pids has changed, `say` when a person should know.
"""

import asyncio
import os
import signal
from asyncio.subprocess import DEVNULL, STDOUT, Process
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from deploy import child

FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 5.0
STEADY_S = 30.0
"""A process that has run for this long has not died of its start: its pauses begin anew."""


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """A process to keep."""

    name: str
    role: str
    argv: tuple[str, ...]
    environ: Mapping[str, str]
    addresses: Mapping[str, str]
    log: Path


class Supervisor:
    """Owns the processes of `specs` from `start` to `stop`."""

    def __init__(
        self,
        specs: Sequence[ProcessSpec],
        *,
        on_change: Callable[[], None],
        say: Callable[[str], None],
    ) -> None:
        self.specs = specs
        self._on_change = on_change
        self._say = say
        self._running: dict[str, Process] = {}

    def pid(self, name: str) -> int:
        """Of a process that was started; it may have ended since."""
        return self._running[name].pid

    async def start(self) -> None:
        for spec in self.specs:
            spec.log.write_bytes(b"")
            await self._spawn(spec)
        self._on_change()

    async def first_end(self) -> tuple[ProcessSpec, str]:
        """Waits until one of them ends; tells which, and how."""
        waits = {asyncio.create_task(self._running[spec.name].wait()): spec for spec in self.specs}
        try:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        ended = done.pop()
        return waits[ended], how_it_ended(ended.result())

    async def keep(self) -> None:
        """Runs until it is cancelled."""
        async with asyncio.TaskGroup() as group:
            for spec in self.specs:
                group.create_task(self._keep(spec))

    async def stop(self, patience_s: float) -> None:
        """Returns when none is left, at most a moment after `patience_s`."""
        for process in self._alive():
            with suppress(ProcessLookupError):
                process.terminate()
        if waits := [asyncio.create_task(process.wait()) for process in self._alive()]:
            await asyncio.wait(waits, timeout=patience_s)
        self.kill()
        await asyncio.gather(*waits)

    def kill(self) -> None:
        """SIGKILL to all that still run, and to what they have started."""
        for process in self._alive():
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

    def _alive(self) -> list[Process]:
        return [process for process in self._running.values() if process.returncode is None]

    async def _keep(self, spec: ProcessSpec) -> None:
        loop = asyncio.get_running_loop()
        pause = 0.0
        while True:
            started = loop.time()
            code = await self._running[spec.name].wait()
            pause = next_pause(pause, uptime_s=loop.time() - started)
            self._say(f"{spec.name} {how_it_ended(code)}; starting it again in {pause:g} s")
            await asyncio.sleep(pause)
            await self._spawn(spec)
            self._on_change()

    async def _spawn(self, spec: ProcessSpec) -> None:
        with spec.log.open("ab") as log:
            self._running[spec.name] = await asyncio.create_subprocess_exec(
                *child.command(*spec.argv),
                env=spec.environ,
                stdin=DEVNULL,
                stdout=log,
                stderr=STDOUT,
                process_group=0,
            )


def next_pause(last_s: float, *, uptime_s: float) -> float:
    """Seconds to wait before a process that ran for `uptime_s` is started again."""
    if last_s == 0 or uptime_s >= STEADY_S:
        return FIRST_PAUSE_S
    return min(2 * last_s, LONGEST_PAUSE_S)


def how_it_ended(code: int) -> str:
    """`code` is a return code as `subprocess` gives it: a signal's is negative."""
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended with status {code}"
