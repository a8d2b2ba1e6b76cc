"""One process of a cluster under test: its log, its signals, and its end."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from tests.e2e.nursery import Nursling, nursery

START_TIMEOUT_S = 60.0
END_TIMEOUT_S = 5.0


class ClusterProcess:
    """One process of the cluster, its log and its signals."""

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        log: Path,
        prefix: Sequence[str] = (),
        environ: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """What `python -m ARGV` is. `prefix`: a command that becomes it, such as `ip netns exec`.
        `environ`: what it has beside ours."""
        self.name = name
        self.log = log
        self._argv = argv
        self._prefix = prefix
        self._environ = environ
        self._popen = self._start()

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def is_running(self) -> bool:
        return self._popen.poll() is None

    def kill(self) -> None:
        """kill -9, and reaps it: a zombie still counts as alive to its peers."""
        self._popen.kill()
        self._popen.wait(END_TIMEOUT_S)

    def freeze(self) -> None:
        self._popen.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._popen.send_signal(signal.SIGCONT)

    def start_again(self) -> None:
        """Same command, same ports, another process."""
        assert not self.is_running
        self._popen = self._start()

    def ask_to_end(self) -> None:
        """SIGTERM."""
        self.thaw()
        self._popen.terminate()

    def wait_end(self) -> None:
        """Fails if it does not end in time and well."""
        try:
            status = self._popen.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._popen.send_signal(signal.SIGUSR1)  # a worker writes its stacks
            time.sleep(0.5)
            self.kill()
            raise AssertionError(f"{self.name} did not end on SIGTERM:\n{self.tail()}") from None
        assert status == 0, f"{self.name} ended with {status}:\n{self.tail()}"

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-4000:]

    def wait_ready(self) -> None:
        """Returns when it serves; fails with its log if it dies or takes too long."""
        raise AssertionError("every kind of process knows when it is ready")

    def wait_until(self, is_ready: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not is_ready():
            assert self.is_running, f"{self.name} died:\n{self.tail()}"
            assert time.monotonic() < deadline, f"{self.name}: not {what}:\n{self.tail()}"
            time.sleep(0.05)

    def _start(self) -> "subprocess.Popen[bytes] | Nursling":
        if not self._prefix:
            return nursery().start(self._argv, self.log, self._environ)
        command = [*self._prefix, sys.executable, "-m", *self._argv]
        with self.log.open("ab") as output:
            environ = {**os.environ, **self._environ}
            return subprocess.Popen(command, stdout=output, stderr=output, env=environ)
