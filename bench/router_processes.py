"""Starts what bench/router.py measures, and ends it: pretended workers, and routers."""

import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

_READY_S, _STOP_S = 60.0, 10.0


@dataclass(frozen=True)
class Told:
    """By a worker, of one answer; nanoseconds of time.monotonic_ns."""

    came: int
    sent: list[int]


@dataclass
class Fakes:
    ports: list[int] = field(default_factory=list)
    logs: list[Path] = field(default_factory=list)

    def told(self) -> dict[int, Told]:
        """By seed."""
        answers = {}
        for log in self.logs:
            for line in log.read_text().splitlines():
                answer = json.loads(line)
                answers[answer["seed"]] = Told(answer["came"], answer["sent"])
        return answers


def spawn_fakes(
    stack: ExitStack, kind: str, count: int, words: dict[str, int], folder: Path
) -> Fakes:
    """Steps of different workers do not begin at the same moment."""
    fakes = Fakes()
    for index in range(count):
        log = folder / f"{kind}-{index}.jsonl"
        command = [sys.executable, "-m", "bench.router_fakes", kind, "--log", str(log)]
        command += ["--phase", str(index / count), "--words", json.dumps(words)]
        command += ["--name", f"{kind}-{index}" if kind == "grpc" else "fake"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        stack.callback(_end, process)
        assert process.stdout is not None
        fakes.ports.append(int(process.stdout.readline()))
        fakes.logs.append(log)
    return fakes


def spawn_router(
    stack: ExitStack, command: list[str], ready_path: str, *, cwd: Path
) -> tuple[int, int]:
    """Its port and its process id, when it is ready."""
    port = free_port()
    silence = subprocess.DEVNULL
    process = subprocess.Popen(
        [*command, "--port", str(port)], cwd=cwd, stdout=silence, stderr=silence
    )
    stack.callback(_end, process)
    until = time.monotonic() + _READY_S
    while not _is_ready(f"http://127.0.0.1:{port}{ready_path}"):
        if process.poll() is not None or time.monotonic() > until:
            raise SystemExit(f"did not become ready: {' '.join(command)}")
        time.sleep(0.1)
    return port, process.pid


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _end(process: subprocess.Popen[str] | subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.stdout is not None:
        process.stdout.close()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port
