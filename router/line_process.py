"""A process of ours that answers lines of JSON (router/confinement.py is its inner side).

1. It is started with the first question, or by `start`, and again after it ended: whatever it was
   killed for is the fault of what it was asked, and no other's.
2. One thread at a time asks. An answer that does not come in time costs the process its life.
3. It ends when this object is forgotten, or the interpreter ends, or at `close`; its stdin ends
   with us, however we end, and it with that.
"""

import json
import os
import selectors
import subprocess
import sys
import time
import weakref

START_S = 20.0
"""For the interpreter, its imports and what it reads first, on a machine that is busy."""


class NotStarted(Exception):
    """It does not get ready; the text is its own reason, empty if it gave none."""


class ProcessGone(Exception):
    """It ended before it answered."""

    def __init__(self, code: int | None) -> None:
        """As `subprocess` has it: below zero, the signal that killed it. None: it was too late."""
        super().__init__(code)
        self.code = code


class LineProcess:
    """See the module. `first` is what it is told first; it answers "ready", or why it is not."""

    def __init__(self, module: str, first: object) -> None:
        self._module, self._first = module, first
        self._is_over = False
        self._process: subprocess.Popen[bytes] | None = None
        self._end: weakref.finalize[..., LineProcess] | None = None

    def start(self) -> None:
        """Unless it runs. Raises NotStarted."""
        if self._process is not None and self._process.poll() is None:
            return
        self.close()
        if self._is_over:
            raise NotStarted
        try:
            process = subprocess.Popen(
                [sys.executable, "-m", self._module],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                bufsize=0,
            )
            self._process, self._end = process, weakref.finalize(self, _end, process)
            told = json.loads(_exchange(process, self._first, START_S))
        except (OSError, EOFError) as error:
            self.close()
            raise NotStarted from error
        if told != "ready":
            self.close()
            raise NotStarted(told["refused"])

    def ask(self, question: object, patience_s: float) -> dict[str, str]:
        """Raises NotStarted, ProcessGone."""
        self.start()
        process = self._process
        assert process is not None
        try:
            told: dict[str, str] = json.loads(_exchange(process, question, patience_s))
        except TimeoutError as error:
            self.close()
            raise ProcessGone(None) from error
        except (OSError, EOFError) as error:
            self.close()
            raise ProcessGone(process.returncode) from error
        return told

    def close_soon(self) -> None:
        """For another thread than the one that asks, which then sees it gone, and must `close`."""
        self._is_over = True
        if self._process is not None:
            self._process.kill()

    def close(self) -> None:
        if self._end is not None:
            self._end()
        self._process = self._end = None


def _exchange(process: subprocess.Popen[bytes], told: object, timeout_s: float) -> bytes:
    """A line there and a line back. Raises EOFError or another OSError than TimeoutError if it is
    gone."""
    assert process.stdin is not None
    assert process.stdout is not None
    os.set_blocking(process.stdin.fileno(), False)  # it may not even read
    unsent, line = memoryview(json.dumps(told).encode() + b"\n"), bytearray()
    deadline = time.monotonic() + timeout_s
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdin, selectors.EVENT_WRITE)
        selector.register(process.stdout, selectors.EVENT_READ)
        while not line.endswith(b"\n"):
            ready = selector.select(max(0.0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError
            for key, _ in ready:
                if key.fileobj is process.stdin:
                    unsent = unsent[os.write(key.fd, unsent) :]
                    if not unsent:
                        selector.unregister(process.stdin)
                    continue
                part = os.read(key.fd, 1 << 20)
                if not part:
                    raise EOFError
                line += part
    return bytes(line)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()  # it holds nothing
    with process:
        pass
