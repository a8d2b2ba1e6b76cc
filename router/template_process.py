"""The process that renders a model's chat template (router/template_sandbox.py), from outside.

1. It is started with the first chat, and again after it was killed: for a rendering that took too
   much time, for one, which is that request's fault or the template's, and no other's.
2. `render` is for threads: one rendering at a time, each of milliseconds.
3. It ends when this object is forgotten, or the interpreter ends.
"""

import json
import os
import selectors
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping

_START_S = 20.0
"""For the interpreter and its imports, on a machine that is busy."""
_PATIENCE_S = 5.0
"""For others' renderings, and for one's own: it bounds itself to less (router/template_sandbox.py),
unless it does not run at all."""


class TemplateBusy(Exception):
    """Others' renderings, or the start of the process, take too long."""


class TemplateRefused(Exception):
    """The template refuses what it was given, or took too much; the text says which."""


class TemplateProcess:
    """See the module."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._end: weakref.finalize[..., TemplateProcess] | None = None

    def render(self, variables: Mapping[str, object]) -> str:
        """Raises TemplateRefused, TemplateBusy."""
        line = json.dumps(variables).encode() + b"\n"
        if not self._lock.acquire(timeout=_PATIENCE_S):
            raise TemplateBusy
        try:
            told = self._ask(line)
        finally:
            self._lock.release()
        if "text" not in told:
            raise TemplateRefused(told["refused"])
        return told["text"]

    def close(self) -> None:
        if self._end is not None:
            self._end()
        self._process = self._end = None

    def _ask(self, line: bytes) -> dict[str, str]:
        process = self._process if self._process is not None else self._start()
        assert process.stdin is not None
        try:
            process.stdin.write(line)
            process.stdin.flush()
            told: dict[str, str] = json.loads(_read_line(process, _PATIENCE_S))
        except (OSError, EOFError) as error:  # killed by the kernel, or to be killed now
            self.close()
            raise TemplateRefused("it takes too much time or memory") from error
        return told

    def _start(self) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, "-m", "router.template_sandbox"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        self._process, self._end = process, weakref.finalize(self, _end, process)
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps(self._source).encode() + b"\n")
            process.stdin.flush()
            told = json.loads(_read_line(process, _START_S))
        except (OSError, EOFError) as error:
            self.close()
            raise TemplateRefused("it takes too much time or memory to compile") from error
        if told != "ready":
            self.close()
            raise TemplateRefused(told["refused"])
        return process


def _read_line(process: subprocess.Popen[bytes], timeout_s: float) -> bytes:
    """Raises EOFError if none comes: the process is gone. TimeoutError, an OSError, if not yet."""
    assert process.stdout is not None
    deadline, line = time.monotonic() + timeout_s, bytearray()
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while not line.endswith(b"\n"):
            if not selector.select(max(0.0, deadline - time.monotonic())):
                raise TimeoutError
            part = os.read(process.stdout.fileno(), 1 << 20)
            if not part:
                raise EOFError
            line += part
    return bytes(line)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()  # it holds nothing
    with process:
        pass
