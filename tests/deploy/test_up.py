"""`baton up` as a person runs it: a real process with real children, which are fakes."""

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.ports import free_port

ROOT = Path(__file__).parents[2]
FAKES = Path(__file__).parent
UP = (str(FAKES / "fake_baton.py"), "up")
ENVIRON = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{FAKES}"}


class Cluster:
    """A `baton up` under way, in a run directory of its own unless told otherwise."""

    def __init__(self, run_dir: Path, *flags: str, port: int | None = None) -> None:
        self.run_dir = run_dir
        self.port = port or free_port()
        argv = [f"--run-dir={run_dir}", f"--port={self.port}", *flags]
        self.process = subprocess.Popen(
            [sys.executable, *UP, *argv],
            env=ENVIRON,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def ready_line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def members(self) -> dict[str, dict[str, Any]]:
        return {m["name"]: m for m in json.loads((self.run_dir / "cluster.json").read_text())}

    def pids(self) -> list[int]:
        return [member["pid"] for member in self.members().values()]

    def end(self, signum: signal.Signals) -> tuple[int, str, str]:
        """Exit status and what was said, after `signum`."""
        self.process.send_signal(signum)
        return self.outcome()

    def outcome(self) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=10)
        return self.process.returncode, out, err


Start = Callable[..., Cluster]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    clusters: list[Cluster] = []

    def start(*flags: str, run_dir: str = "run", port: int | None = None) -> Cluster:
        clusters.append(Cluster(tmp_path / run_dir, *flags, port=port))
        return clusters[-1]

    yield start
    for cluster in clusters:
        if cluster.process.poll() is None:
            cluster.process.kill()
            cluster.process.communicate()


def is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def until(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_the_ready_line_is_a_request_that_works(start: Start) -> None:
    cluster = start("--prefill=2", "--decode=1", "--dtype=float32", "--kv-memory=2MiB")
    ready, curl, url, _, header, _, body = shlex.split(cluster.ready_line())
    assert (ready, curl) == ("Ready:", "curl")
    headers = dict([header.split(": ")])
    with urllib.request.urlopen(urllib.request.Request(url, body.encode(), headers)) as reply:
        answer = reply.read().decode()
    assert json.loads(body)["model"] == "smollm2"
    members = cluster.members()
    assert list(members) == ["prefill-0", "prefill-1", "decode-0", "router"]
    assert members["router"]["addresses"]["http"] == f"127.0.0.1:{cluster.port}"
    assert "--served-model-name smollm2" in answer
    assert f"--decode {members['decode-0']['addresses']['grpc']}" in answer
    log = Path(members["prefill-1"]["log"]).read_text()
    for flag in ("'--role', 'prefill'", "'float32'", f"'{2 << 20}'", "'/models/smollm2'"):
        assert flag in log


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_all_and_leaves_nothing(start: Start, signum: signal.Signals) -> None:
    cluster = start()
    cluster.ready_line()
    pids = cluster.pids()
    began = time.monotonic()
    status, out, _ = cluster.end(signum)
    assert (status, out) == (0, "")
    assert time.monotonic() - began < 2
    assert all(is_gone(pid) for pid in pids)
    assert sorted(path.name for path in cluster.run_dir.iterdir()) == [
        "decode-0.log",
        "lock",
        "prefill-0.log",
        "router.log",
    ]


def test_a_child_that_ignores_sigterm_or_is_stopped_is_killed_in_time(start: Start) -> None:
    cluster = start("--prefill-args=--fake stubborn")
    cluster.ready_line()
    pids = cluster.pids()
    os.kill(cluster.members()["decode-0"]["pid"], signal.SIGSTOP)
    began = time.monotonic()
    assert cluster.end(signal.SIGTERM)[0] == 0
    assert time.monotonic() - began < 5
    assert all(is_gone(pid) for pid in pids)


def test_a_second_signal_does_not_wait(start: Start) -> None:
    cluster = start("--prefill-args=--fake stubborn")
    cluster.ready_line()
    pids = cluster.pids()
    began = time.monotonic()
    cluster.process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    cluster.end(signal.SIGINT)
    assert time.monotonic() - began < 2
    until(lambda: all(is_gone(pid) for pid in pids))


def test_children_die_with_a_killed_parent(start: Start) -> None:
    cluster = start("--prefill-args=--fake stubborn")
    cluster.ready_line()
    pids = cluster.pids()
    cluster.end(signal.SIGKILL)
    until(lambda: all(is_gone(pid) for pid in pids))
    again = start(port=cluster.port)
    assert again.ready_line()


@pytest.mark.parametrize("name", ["decode-0", "router"])
def test_a_dead_process_is_started_again_where_it_was(start: Start, name: str) -> None:
    cluster = start()
    cluster.ready_line()
    before = cluster.members()
    os.kill(before[name]["pid"], signal.SIGKILL)
    until(lambda: cluster.members()[name]["pid"] != before[name]["pid"])
    after = cluster.members()
    assert after[name]["addresses"] == before[name]["addresses"]
    assert [n for n in after if after[n]["pid"] != before[n]["pid"]] == [name]
    status, _, err = cluster.end(signal.SIGTERM)
    assert status == 0
    assert f"{name} was killed by SIGKILL; starting it again in 0.5 s" in err


def test_a_process_that_dies_at_its_start_ends_the_cluster(start: Start) -> None:
    cluster = start("--decode-args=--fake die")
    status, out, err = cluster.outcome()
    assert (status, out) == (1, "")
    assert "decode-0 ended with status 1 at its start" in err
    assert "the last words" in err
    assert not (cluster.run_dir / "cluster.json").exists()


def test_clusters_coexist_but_not_in_one_run_directory(start: Start) -> None:
    first, second = start(run_dir="first"), start(run_dir="second")
    assert first.ready_line()
    assert second.ready_line()
    status, _, err = start(run_dir="first").outcome()
    assert status == 1
    assert "another cluster runs in" in err
    assert set(first.members()) == set(second.members())


def test_a_taken_port_is_a_clear_error(start: Start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        status, _, err = start(port=port).outcome()
    assert status == 1
    assert f"cannot listen on 127.0.0.1:{port}" in err
    assert "Traceback" not in err


def test_colocated_has_no_prefill_workers(start: Start) -> None:
    cluster = start("--mode=colocated", "--decode=2")
    cluster.ready_line()
    assert list(cluster.members()) == ["decode-0", "decode-1", "router"]


def test_an_unknown_model_is_a_clear_error(start: Start) -> None:
    status, _, err = start("--model=unknown").outcome()
    assert status == 1
    assert "no such model" in err
    assert "cannot prepare the model unknown" in err
