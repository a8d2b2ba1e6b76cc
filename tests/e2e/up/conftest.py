"""One cluster of `baton up` for each mode, for all tests of this folder."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import trustme

from tests.e2e.up.cluster_up import Up, read_line
from tests.ports import free_port
from tests.tls_files import write_tls_files


def mutual_tls(folder: Path) -> dict[str, str]:
    """What the environment says to a cluster whose processes have certificates."""
    files = write_tls_files(folder / "tls", trustme.CA(), "127.0.0.1")
    names = ("BATON_TLS_CERT", "BATON_TLS_KEY", "BATON_TLS_CA")
    return {name: str(file) for name, file in zip(names, files, strict=True)}


@pytest.fixture(scope="session", params=["disaggregated", "colocated"])
def up(
    request: pytest.FixtureRequest, smollm2: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Up]:
    run_dir = tmp_path_factory.mktemp("up")
    port = free_port()
    command = [sys.executable, "-m", "deploy.cli", "up", "--port", str(port)]
    command += ["--run-dir", str(run_dir), "--mode", request.param, "--kv-memory", "256MiB"]
    environ = os.environ | (mutual_tls(run_dir) if request.param == "colocated" else {})
    with (run_dir / "up.log").open("w") as errors:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environ
        )
    try:
        line = read_line(process.stdout)
        assert line, (run_dir / "up.log").read_text()
        yield Up(process, line, f"http://127.0.0.1:{port}", run_dir)
        family = psutil.Process(process.pid).children(recursive=True)
        started = time.monotonic()
        process.send_signal(signal.SIGINT)
        assert process.wait(5) == 0
        assert time.monotonic() - started < 5
        assert not [child for child in family if child.is_running()], "it leaves nothing behind"
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()
