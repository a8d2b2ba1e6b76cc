"""`baton doctor`: can this machine serve, and how well? What it finds, and what to do about each.

Looks at Python, torch and its cards, UCX (by really shipping KV between two processes), RDMA,
memory, disk, open files, ports, the prepared model and a cluster that runs here. `ok`: fine;
`note`: works, and could be better; `fix`: does not work until something is done. The exit status
is 1 where there is something to fix.
"""

import asyncio
import importlib.metadata
import json
import os
import platform
import resource
import shutil
import socket
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

from deploy import target
from deploy.target import NoRouter, ask
from runtime.exit_status import INTERRUPTED

Level = Literal["ok", "note", "fix"]

GIB = 1 << 30
LEAST_MEMORY_GIB, GOOD_MEMORY_GIB = 2.0, 8.0
LEAST_DISK_GIB = 2.0
LEAST_FILES = 4096
SLOW_FABRIC = 1e9
"""Bytes/s within a host; memory allows ten times as much."""

_STYLES: dict[Level, str] = {"ok": "green", "note": "yellow", "fix": "bold red"}


@dataclass(frozen=True, slots=True)
class Finding:
    """`advice` is empty where there is nothing to do."""

    what: str
    level: Level
    said: str
    advice: str = ""


def main(argv: Sequence[str]) -> int:
    parser = target.parser_of("doctor", __doc__)
    parser.add_argument("--port", type=int, default=8000, help="that a router would take")
    parser.add_argument("--json", action="store_true", help="the findings, as one list")
    options = parser.parse_args(argv)
    console = Console(highlight=False)
    try:
        with Console(stderr=True).status("Looking"):
            findings = [finding for look in LOOKS for finding in look(options)]
    except KeyboardInterrupt:
        return INTERRUPTED
    if options.json:
        print(json.dumps([asdict(finding) for finding in findings]))
    else:
        console.print(_table(findings))
    return 1 if any(finding.level == "fix" for finding in findings) else 0


def _table(findings: Sequence[Finding]) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True, style="bold")
    table.add_column(overflow="fold")
    for finding in findings:
        told = Text(finding.said)
        if finding.advice:
            told.append(f"\n→ {finding.advice}", style=_STYLES[finding.level])
        table.add_row(Text(finding.level, style=_STYLES[finding.level]), finding.what, told)
    return table


def _python(options: Namespace) -> Iterator[Finding]:
    told = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    if platform.system() != "Linux":
        yield Finding("python", "fix", told, "Baton's fabric (UCX) runs on Linux only.")
    else:
        yield Finding("python", "ok", told)


def _torch(options: Namespace) -> Iterator[Finding]:
    try:
        import torch
    except ImportError as error:
        yield Finding("torch", "fix", str(error), "Install it: scripts/venv, or pip install torch.")
        return
    cores = len(os.sched_getaffinity(0))
    capability = torch.backends.cpu.get_cpu_capability()
    yield Finding("torch", "ok", f"{torch.__version__}, {cores} CPU cores with {capability}")
    if not torch.cuda.is_available():
        built = torch.version.cuda
        why = "the driver shows no card" if built else "this build of torch knows no CUDA"
        advice = "Nothing to do on a machine without one; else " + (
            "look at nvidia-smi." if built else "take torch from its CUDA index (TORCH_INDEX)."
        )
        yield Finding("CUDA", "note", f"no card is used: {why}", advice)
        return
    for index in range(torch.cuda.device_count()):
        card = torch.cuda.get_device_properties(index)
        yield Finding("CUDA", "ok", f"{index}: {card.name}, {card.total_memory / GIB:.0f} GiB")
    yield _flashinfer()


def _flashinfer() -> Finding:
    try:
        version = importlib.metadata.version("flashinfer-python")
    except importlib.metadata.PackageNotFoundError:
        advice = "scripts/venv cuda installs it; attention by torch is slower."
        return Finding("FlashInfer", "note", "is not installed", advice)
    if shutil.which("nvcc") is None:
        advice = "Install the CUDA toolkit, or flashinfer-jit-cache: its kernels are compiled once."
        return Finding("FlashInfer", "note", f"{version}, but there is no nvcc", advice)
    return Finding("FlashInfer", "ok", version)


def _fabric(options: Namespace) -> Iterator[Finding]:
    from deploy import self_test  # loads much that a help text need not wait for
    from kvfabric.errors import FabricError

    try:
        outcome = asyncio.run(self_test.alone())
    except (FabricError, self_test.SelfTestFailed, OSError, RuntimeError) as error:
        said = str(error) or type(error).__name__
        advice = "Is ucxx installed for torch's CUDA (ucxx-cu13, ucxx-cu12)? UCX_LOG_LEVEL=info."
        yield Finding("UCX", "fix", f"ships nothing between two processes: {said}", advice)
        return
    over = "+".join(outcome.transports)
    told = f"ships {outcome.nbytes_per_s / 1e9:.1f} GB/s between two processes, over {over}"
    if outcome.nbytes_per_s < SLOW_FABRIC:
        advice = "Within a host this should be shared memory: look at UCX_TLS and /dev/shm's size."
        yield Finding("UCX", "note", told, advice)
    else:
        yield Finding("UCX", "ok", told)


def _rdma(options: Namespace, root: Path = Path("/sys/class/infiniband")) -> Iterator[Finding]:
    devices = sorted(device.name for device in root.iterdir()) if root.is_dir() else []
    if devices:
        yield Finding("RDMA", "ok", f"{', '.join(devices)}: UCX takes it by itself")
    else:
        advice = "Between hosts KV goes over TCP. In a container give it /dev/infiniband."
        yield Finding("RDMA", "note", "this machine shows no device", advice)


def _memory(options: Namespace) -> Iterator[Finding]:
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(fields["MemAvailable"].split()[0]) * 1024 / GIB
    told = f"{free:.1f} GiB available"
    if free < LEAST_MEMORY_GIB:
        yield Finding("memory", "fix", told, "The demo model wants 2 GiB: --kv-memory 128MiB.")
    elif free < GOOD_MEMORY_GIB:
        yield Finding("memory", "note", told, "Enough for the demo; say --kv-memory for more.")
    else:
        yield Finding("memory", "ok", told)
    shm = shutil.disk_usage("/dev/shm").free / GIB if Path("/dev/shm").is_dir() else 0.0
    if shm < 0.25:
        advice = "UCX's shared memory lies there. In a container: --shm-size 1g, or --ipc host."
        yield Finding("/dev/shm", "note", f"{shm:.2f} GiB free", advice)
    else:
        yield Finding("/dev/shm", "ok", f"{shm:.1f} GiB free")


def _files(options: Namespace) -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < LEAST_FILES:
        advice = f"Each stream takes one in the router: ulimit -n {min(hard, 65536)}."
        yield Finding("open files", "note", f"at most {soft}", advice)
    else:
        yield Finding("open files", "ok", f"at most {soft}")


def _cache(options: Namespace) -> Iterator[Finding]:
    from engine.model_cache import default_cache_root

    root = default_cache_root()
    place = next(folder for folder in (root, *root.parents) if folder.exists())
    if not os.access(place, os.W_OK):
        advice = "Name another folder by BATON_CACHE: models and compiled kernels go there."
        yield Finding("cache", "fix", f"{root} cannot be written", advice)
        return
    free = shutil.disk_usage(place).free / GIB
    if free < LEAST_DISK_GIB:
        yield Finding("cache", "note", f"{free:.1f} GiB left for {root}", "BATON_CACHE moves it.")
    models = sorted(folder.name for folder in (root / "models").glob("*") if folder.is_dir())
    if models:
        yield Finding("model", "ok", f"{', '.join(models)} in {root}")
    else:
        advice = "`baton prepare --model smollm2` fetches the demo model (93 MB)."
        yield Finding("model", "note", f"none is prepared in {root}", advice)


def _cluster(options: Namespace) -> Iterator[Finding]:
    try:
        http = target.client_of(options)
    except NoRouter:  # none is meant
        yield _port(options.port)
        return
    try:
        with http:
            cluster = ask(http, "/v1/cluster")["cluster"]
    except NoRouter as error:
        advice = "`baton up` starts one; where there are keys, --api-key-file names an operator's."
        yield Finding("cluster", "note", str(error), advice)
        yield _port(options.port)
        return
    problems = [f"{one['name']}: {one['problem']}" for one in cluster["workers"] if one["problem"]]
    if cluster["ready"] and not problems:
        yield Finding("cluster", "ok", f"serves {cluster['model']}, {cluster['mode']}")
    else:
        told = "; ".join(problems) or "not ready"
        yield Finding("cluster", "note", told, "`baton workers`, and the logs in its run directory")


def _port(port: int) -> Finding:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            said = f"{port} cannot be had: {error.strerror}"
            return Finding("port", "fix", said, "Say `baton up --port N`, or end who has it.")
    return Finding("port", "ok", f"{port} is free")


LOOKS: tuple[Callable[[Namespace], Iterator[Finding]], ...] = (
    _python, _torch, _fabric, _rdma, _memory, _files, _cache, _cluster,
)  # fmt: skip


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
