"""Workers and routers forked off a process that has loaded what they load: two seconds less each.

`python -m tests.e2e.nursery` loads it. Then, for each JSON line on stdin, {"argv", "log",
"environ"}, it forks a process that does what `python -m ARGV` would, on a log of its own and with
these in its environment. It prints {"born": pid}, and
{"ended": pid, "status": n} when one has ended, as subprocess counts. All end with it, and it with
stdin.

It has used nothing of what it has loaded: UCX, gRPC and torch start in those that it forks. It has
one thread of its own, and OpenBLAS's, which look after themselves in a fork.
"""

import contextlib
import ctypes
import importlib
import json
import os
import select
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

MODULES = {"deploy.worker": "deploy.worker", "router": "router.__main__"}
"""What can be started here, and where its `main` is."""
_LOADED_TOO = ("kvfabric.ucx", "engine.cpu.model")
_START_S, _TELL_S = 60.0, 10.0
_PR_SET_PDEATHSIG = 1


class Nursling:
    """One process, as subprocess.Popen has it."""

    def __init__(self, nursery: "Nursery", pid: int) -> None:
        self.pid = pid
        self._nursery = nursery

    def poll(self) -> int | None:
        return self._nursery.status_of(self.pid, 0.0)

    def wait(self, timeout: float) -> int:
        """Raises subprocess.TimeoutExpired. Keeps nobody else from asking meanwhile."""
        with contextlib.suppress(ProcessLookupError):  # it has ended
            pidfd = os.pidfd_open(self.pid)
            try:
                ended, _, _ = select.select([pidfd], [], [], timeout)
            finally:
                os.close(pidfd)
            if not ended:
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
        status = self._nursery.status_of(self.pid, _TELL_S)
        assert status is not None, "the nursery says nothing"
        return status

    def send_signal(self, signum: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, signum)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Nursery:
    """The process, from outside. Any thread."""

    def __init__(self) -> None:
        self._popen = subprocess.Popen(
            [sys.executable, "-m", "tests.e2e.nursery"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._lock = threading.Lock()
        self._statuses: dict[int, int] = {}
        self._unread = b""

    def start(
        self, argv: Sequence[str], log: Path, environ: Mapping[str, str] = MappingProxyType({})
    ) -> Nursling:
        assert self._popen.stdin is not None
        with self._lock:
            request = {"argv": list(argv), "log": str(log), "environ": dict(environ)}
            self._popen.stdin.write(json.dumps(request).encode() + b"\n")
            self._popen.stdin.flush()
            pid = None
            while pid is None:
                told = self._hear(_START_S)
                assert told is not None, "the nursery says nothing"
                pid = told.get("born")
            self._statuses.pop(pid, None)  # of another that had this number
            return Nursling(self, pid)

    def status_of(self, pid: int, within_s: float) -> int | None:
        """None: it has not ended."""
        deadline = time.monotonic() + within_s
        with self._lock:
            while pid not in self._statuses:
                if self._hear(max(0.0, deadline - time.monotonic())) is None:
                    return None
            return self._statuses[pid]

    def close(self) -> None:
        with self._popen as popen:
            assert popen.stdin is not None
            popen.stdin.close()
            assert popen.wait(_START_S) == 0

    def _hear(self, within_s: float) -> dict[str, int] | None:
        """The next that it says, if it says something in time."""
        assert self._popen.stdout is not None
        deadline = time.monotonic() + within_s
        with selectors.DefaultSelector() as selector:
            selector.register(self._popen.stdout, selectors.EVENT_READ)
            while b"\n" not in self._unread:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    return None
                part = os.read(self._popen.stdout.fileno(), 1 << 16)
                assert part, "the nursery ended"
                self._unread += part
        line, _, self._unread = self._unread.partition(b"\n")
        told: dict[str, int] = json.loads(line)
        if "ended" in told:
            self._statuses[told["ended"]] = told["status"]
        return told


_opened: list[Nursery] = []


def nursery() -> Nursery:
    """The one of this test run; it starts with the first use."""
    if not _opened:
        _opened.append(Nursery())
    return _opened[0]


def close_nursery() -> None:
    while _opened:
        _opened.pop().close()


def main() -> None:
    for name in (*MODULES.values(), *_LOADED_TOO):
        importlib.import_module(name)
    assert threading.active_count() == 1
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the tests end their clusters themselves
    nursery = os.getpid()
    request = _serve()
    if request is None:
        os._exit(0)  # to take apart all that is loaded would take a second
    os.environ.update(request["environ"])
    _become(request["argv"], request["log"], nursery)


def _serve() -> dict[str, Any] | None:
    """Until stdin ends; in a process that was forked: at once, what it shall be."""
    unread = b""
    with selectors.DefaultSelector() as selector:
        selector.register(0, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fd != 0:
                    selector.unregister(key.fd)
                    _bury(key.fd, key.data)
                    continue
                part = os.read(0, 1 << 16)
                if not part:
                    return None
                *lines, unread = (unread + part).split(b"\n")
                for line in lines:
                    if (pid := os.fork()) == 0:
                        request: dict[str, Any] = json.loads(line)
                        return request
                    selector.register(os.pidfd_open(pid), selectors.EVENT_READ, pid)
                    _tell(born=pid)


def _bury(pidfd: int, pid: int) -> None:
    os.close(pidfd)
    _, status = os.waitpid(pid, 0)
    _tell(ended=pid, status=os.waitstatus_to_exitcode(status))


def _tell(**said: int) -> None:
    os.write(1, json.dumps(said).encode() + b"\n")


def _become(argv: list[str], log: str, nursery: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    assert os.getppid() == nursery, "it ended meanwhile"
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for descriptor, path in ((0, os.devnull), (1, log), (2, log)):
        opened = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(opened, descriptor)
        os.close(opened)
    sys.argv = argv
    importlib.import_module(MODULES[argv[0]]).main()


if __name__ == "__main__":
    main()
