"""What this machine could do: one thread's memcpy, and UCX itself without Python."""

import os
import socket
import subprocess
import time
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from bench.limited_link import LOOPBACK, Link


def memcpy_gbps(nbytes: int = 64 << 20, reps: int = 9) -> float:
    """Best of some copies between two buffers larger than the caches; bytes copied, not moved."""
    source, target = np.ones(nbytes, np.uint8), np.ones(nbytes, np.uint8)
    best = float("inf")
    for _ in range(reps):
        started = time.perf_counter()
        np.copyto(target, source)
        best = min(best, time.perf_counter() - started)
    return nbytes / best / 1e9


def perftest_gbps(
    nbytes: int,
    iterations: int = 400,
    *,
    notices_failure: bool = False,
    link: Link = LOOPBACK,
) -> float | None:
    """`ucx_perftest` of the wheel, sleeping like the fabric does; None where there is none.
    `notices_failure`: with endpoints that notice a peer's end, as ours must; UCX then copies twice
    over shared memory, and once (cma) without."""
    package = find_spec("libucx")
    if package is None or not package.submodule_search_locations:
        return None
    folder = Path(package.submodule_search_locations[0])
    program = folder / "bin" / "ucx_perftest"
    if not program.exists():
        return None
    environment = {
        **os.environ,
        "LD_LIBRARY_PATH": str(folder / "lib"),
        "UCX_MM_ERROR_HANDLING": "y",
        "UCX_WARN_UNUSED_ENV_VARS": "n",
    }
    port = _free_port()
    command = [str(program), "-p", str(port), "-t", "tag_bw", "-E", "sleep", "-f"]
    command += ["-s", str(nbytes), "-n", str(iterations), "-w", "20"]
    command += ["-e"] * notices_failure
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as server:
        try:
            if not _listens(port):
                return None
            client = subprocess.run(
                [*link.prefix, *command, link.here],
                env=environment,
                capture_output=True,
                text=True,
                timeout=60,
            )
        finally:
            server.kill()
    return _overall_gbps(client.stdout)


def _overall_gbps(output: str) -> float | None:
    """The last line of numbers: stage, iterations, three latencies, average and overall MB/s."""
    for line in reversed(output.splitlines()):
        fields = line.split()
        if len(fields) >= 7 and fields[-1].isdigit():
            return float(fields[-3]) * (1 << 20) / 1e9
    return None


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _listens(port: int) -> bool:
    """The server takes a first connection for its client's, so look without connecting."""
    wanted, listening = f":{port:04X} ", " 0A "
    for _ in range(500):
        tables = Path("/proc/net/tcp").read_text() + Path("/proc/net/tcp6").read_text()
        if any(wanted in line and listening in line for line in tables.splitlines()):
            return True
        time.sleep(0.02)
    return False
