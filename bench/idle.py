"""What a cluster takes that is left alone: `python -m bench.idle [--seconds 20] [-- FLAG...]`.

Starts `baton up` (flags behind `--` are its own), lets it settle, and reads how much of a core each
process and each of its threads took (/proc, so Linux only), and how much memory. One request is
answered before, so that connections between the workers are there. The goal is below 2 % of a core
for a worker. The ceiling goes first: what a process takes that only sleeps, by the same reading.
The last line is JSON.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_SETTLE_S, _STOP_S = 3.0, 20.0
_PROMPT = {"prompt": "The relay runner hands over the baton. " * 8, "max_tokens": 8}


@contextmanager
def cluster(flags: list[str], port: int) -> Iterator[list[dict[str, Any]]]:
    """The members of a cluster that is ready, as `cluster.json` has them."""
    with tempfile.TemporaryDirectory() as folder:
        own = ["--run-dir", folder, "--port", str(port)]
        command = [sys.executable, "-m", "deploy.cli", "up", *own, *flags]
        launcher = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            assert launcher.stdout is not None
            if not launcher.stdout.readline():
                raise SystemExit("the cluster did not become ready")
            yield json.loads((Path(folder) / "cluster.json").read_text())
        finally:
            launcher.terminate()
            launcher.wait(_STOP_S)


def ask(port: int) -> None:
    body = json.dumps({"model": model_of(port), **_PROMPT}).encode()
    url, kind = f"http://127.0.0.1:{port}/v1/completions", {"Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(url, body, kind), timeout=60) as answer:
        answer.read()


def model_of(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=10) as answer:
        name: str = json.load(answer)["data"][0]["id"]
    return name


def thread_ms(pid: int) -> dict[int, float]:
    """CPU time that each thread has taken so far, by nanoseconds of the scheduler."""
    taken = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        taken[int(task.name)] = int((task / "schedstat").read_text().split()[0]) / 1e6
    return taken


def memory_mb(pid: int) -> dict[str, int]:
    """Resident; the process's share of it; what it shares with nobody."""
    fields = dict(
        line.split(":") for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    )
    kb = {name: int(text.split()[0]) for name, text in fields.items()}
    return {
        "rss": kb["Rss"] // 1024,
        "pss": kb["Pss"] // 1024,
        "private": (kb["Private_Clean"] + kb["Private_Dirty"]) // 1024,
    }


def shares(pids: list[int], seconds: float) -> dict[int, list[float]]:
    """Percent of a core that the threads of each process take, the busiest first."""
    before, began = {pid: thread_ms(pid) for pid in pids}, time.monotonic()
    time.sleep(seconds)
    after, wall_ms = {pid: thread_ms(pid) for pid in pids}, 1e3 * (time.monotonic() - began)
    return {
        pid: sorted(
            (100 * (ms - before[pid].get(tid, 0.0)) / wall_ms for tid, ms in after[pid].items()),
            reverse=True,
        )
        for pid in pids
    }


def sleeper() -> float:
    """Percent of a core of a process that does nothing."""
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    with subprocess.Popen(command) as process:
        try:
            time.sleep(1.0)
            return sum(shares([process.pid], 2.0)[process.pid])
        finally:
            process.kill()


def report(members: list[dict[str, Any]], taken: dict[int, list[float]]) -> list[dict[str, Any]]:
    told = []
    print(f"{'process':12} {'% of a core':>11} {'RSS MB':>7} {'PSS MB':>7} {'private':>7}  threads")
    for member in members:
        pid, memory = member["pid"], memory_mb(member["pid"])
        busy = [round(share, 2) for share in taken[pid] if share >= 0.01]
        columns = (f"{memory[key]:7}" for key in ("rss", "pss", "private"))
        print(f"{member['name']:12} {sum(taken[pid]):11.2f}", *columns, f" {busy}")
        told.append({"name": member["name"], "percent": round(sum(taken[pid]), 2), **memory})
        told[-1] |= {"threads": len(taken[pid]), "percent_by_thread": busy}
    return told


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.idle", description=__doc__)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--port", type=int, default=8290)
    parser.add_argument("flags", nargs="*", help="of `baton up`, behind --")
    args = parser.parse_args()
    print(f"ceiling: a process that sleeps takes {sleeper():.2f} % of a core")
    with cluster(args.flags, args.port) as members:
        ask(args.port)
        time.sleep(_SETTLE_S)
        taken = shares([member["pid"] for member in members], args.seconds)
        told = report(members, taken)
    print(json.dumps({"bench": "idle", "seconds": args.seconds, "processes": told}))


if __name__ == "__main__":
    main()
