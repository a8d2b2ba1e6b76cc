"""What `baton up` will start: its flags, turned into one `ProcessSpec` for each process.

Pure, but for looking at the machine: which ports are free, which cores and GPUs there are.
"""

import json
import os
import random
import shlex
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

from deploy.placement import Placement, place, usable_cores, visible_gpus
from deploy.processes import ProcessSpec
from deploy.worker_config import MIXED_TPOT_SLO_MS
from runtime.flags import flag, nbytes

LOOPBACK = "127.0.0.1"

WORKER = "deploy.worker"
ROUTER = "router"
NEW_KEY = "router.new_key"
"""Modules, started with `python -m`."""

STOP_GRACE_S = 2.0
"""Running requests get this long when the cluster stops; then processes close what they hold."""

RESTART_S = 30.0
"""A request waits so long for a worker that is being started again: with one worker of a role there
is no other. Loading a model takes 5 s on idle cores, and longer where others use them."""


class BadPlan(Exception):
    """The flags ask for something that cannot be."""


@dataclass(frozen=True, kw_only=True)
class UpConfig:
    """Flags of `baton up`, each also an environment variable BATON_<NAME>."""

    prefill: int = flag(1, help="number of prefill workers")
    decode: int = flag(1, help="number of decode workers")
    both: int = flag(
        0,
        help="number of workers that serve both roles: prompts of others, and streams; with them "
        "--prefill 0 and --decode 0 are possible",
    )
    mode: Literal["disaggregated", "colocated"] = flag(
        "disaggregated",
        help="disaggregated: prefill workers compute prompts and hand their KV to decode workers; "
        "colocated: there are only decode workers, and they compute prompts too",
    )
    model: str = flag(
        "smollm2", help="a Hugging Face folder, a .gguf file, a hub id, or the alias smollm2"
    )
    device: Literal["auto", "cpu", "cuda"] = flag("auto", help="where the model runs")
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = flag(
        "auto", help="of weights and KV; auto is what the model is stored in"
    )
    tensor_parallel: int = flag(
        1, help="processes (ranks) that compute the model of a worker together, each a part of it"
    )
    prefill_tensor_parallel: int | None = flag(
        None, help="of prefill workers (default: as --tensor-parallel)"
    )
    decode_tensor_parallel: int | None = flag(
        None, help="of decode workers (default: as --tensor-parallel)"
    )
    kv_memory: int = flag(1 << 30, parse=nbytes, metavar="SIZE", help="KV pool of each worker")
    cores: str = flag(
        "auto", help="cores for CPU workers: auto, none (not pinned) or a list such as 0-3,8"
    )
    host: str = flag(LOOPBACK, help="address the router listens on")
    port: int = flag(8000, help="port the router listens on")
    run_dir: str = flag(".baton", help="folder for logs and cluster.json; one cluster in each")
    ready_timeout_s: float = flag(300.0, help="give up if the cluster is not ready by then")
    router_args: str = flag("", help="more flags for the router: --router-args='--max-prompts 8'")
    worker_args: str = flag("", help="more flags for every worker: --worker-args=--no-checksum")
    prefill_args: str = flag("", help="more flags for prefill workers")
    decode_args: str = flag("", help="more flags for decode workers")

    def ranks(self, role: str) -> int:
        """Of each worker of the role; `both` as decode."""
        own = self.prefill_tensor_parallel if role == "prefill" else self.decode_tensor_parallel
        return self.tensor_parallel if own is None else own


@dataclass(frozen=True, slots=True)
class Model:
    """A model that was prepared: what `python -m engine.prepare` prints."""

    path: str
    served_model_name: str

    @classmethod
    def from_json(cls, text: bytes) -> "Model":
        answer = json.loads(text)
        return cls(answer["path"], answer["served_model_name"])


@dataclass(frozen=True, slots=True)
class Plan:
    model: Model
    specs: tuple[ProcessSpec, ...]
    """Workers first; the router, which calls them, last."""
    url: str
    """Of the router, as a client on this machine reaches it."""
    placement: str
    """For people: where the workers run."""


def check(config: UpConfig) -> None:
    """Raises BadPlan for what can be known to fail before anything is started."""
    if min(config.prefill, config.decode, config.both) < 0:
        raise BadPlan("--prefill, --decode and --both must be at least 0")
    if config.decode + config.both < 1:
        raise BadPlan("--decode must be at least 1, or --both")
    if config.mode == "disaggregated" and config.prefill + config.both < 1:
        raise BadPlan("--prefill must be at least 1, or --both; for none, say --mode colocated")
    if config.mode == "colocated" and config.both:
        raise BadPlan("--both is of no use with --mode colocated: decode workers compute prompts")
    if min(config.ranks("prefill"), config.ranks("decode")) < 1:
        raise BadPlan("--tensor-parallel must be at least 1, for either role")
    if not 1 <= config.port < 1 << 16:
        raise BadPlan(f"--port {config.port} is no port: 1 to 65535 are")
    for name in ("router_args", "worker_args", "prefill_args", "decode_args"):
        try:
            shlex.split(getattr(config, name))
        except ValueError as error:
            raise BadPlan(f"--{name.replace('_', '-')} cannot be read: {error}") from error
    if not _is_free(config.host, config.port):
        raise BadPlan(
            f"cannot listen on {config.host}:{config.port}: it is taken, or not an address of "
            "this machine; choose another --port or --host"
        )


def make(
    config: UpConfig,
    model: Model,
    log: Callable[[str], Path],
    environ: Mapping[str, str],
    admin_token_file: Path,
) -> Plan:
    """`log` gives the log file of a process by its name. Raises BadCores, BadGpus."""
    prefill = config.prefill if config.mode == "disaggregated" else 0
    counts = {"prefill": prefill, "decode": config.decode, "both": config.both}
    roles = [role for role, count in counts.items() for _ in range(count)]
    names = [f"{role}-{i}" for role, count in counts.items() for i in range(count)]
    ports = iter(free_ports(2 * len(roles) + 1))
    ranks = [config.ranks(role) for role in roles]
    gpus = visible_gpus(config.device, environ)
    placement = place(names, ranks, usable_cores(config.cores), gpus)
    base = child_environ(environ)
    if config.mode == "colocated":  # decode workers compute all prompts
        base.setdefault("BATON_TPOT_SLO_MS", f"{MIXED_TPOT_SLO_MS:g}")
    workers = tuple(
        ProcessSpec(
            name=name,
            role=role,
            argv=(
                *_worker_argv(config, model, name, role, grpc_port, metrics_port),
                *_cores_argv(placement, i),
                *_more(config, role),
            ),
            environ=base | _gpu_environ(placement, i),
            addresses=_worker_addresses(grpc_port, metrics_port),
            log=log(name),
        )
        for i, (name, role) in enumerate(zip(names, roles, strict=True))
        for grpc_port, metrics_port in [(next(ports), next(ports))]
    )
    admin = (f"{LOOPBACK}:{next(ports)}", admin_token_file)
    router = _router(config, model, workers, log("router"), base, admin)
    return Plan(model, (*workers, router), f"http://{router.addresses['http']}", placement.summary)


def child_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of the processes: ours, without what was meant for `baton up`.

    The packages are found where this one was found, whatever the working directory holds.
    """
    own = {f"BATON_{field.name.upper()}" for field in fields(UpConfig)}
    kept = {name: value for name, value in environ.items() if name not in own}
    root = str(Path(__file__).resolve().parent.parent)
    kept["PYTHONPATH"] = os.pathsep.join(filter(None, [root, environ.get("PYTHONPATH")]))
    return kept | {"PYTHONSAFEPATH": "1", "PYTHONFAULTHANDLER": "1"}


def free_ports(count: int) -> list[int]:
    """Loopback ports that are free now, below those that the kernel gives to connections.

    A worker that is started again needs its port again. A port that the kernel picks itself, by
    binding port 0, could have gone to somebody's connection by then.
    """
    ports: list[int] = []
    for port in random.sample(range(20000, 32768), 4096):
        if len(ports) == count:
            return ports
        if _is_free(LOOPBACK, port):
            ports.append(port)
    raise BadPlan(f"cannot find {count} free ports on {LOOPBACK}")


def _is_free(host: str, port: int) -> bool:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        # As servers do: a connection that lingers after its end does not hold the port.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen()
        except OSError:
            return False
    return True


def _worker_argv(
    config: UpConfig, model: Model, name: str, role: str, grpc_port: int, metrics_port: int
) -> tuple[str, ...]:
    return (
        *(sys.executable, "-m", WORKER, "--role", role, "--name", name),
        *("--model-path", model.path, "--device", config.device, "--dtype", config.dtype),
        *("--tensor-parallel", str(config.ranks(role)), "--kv-memory", str(config.kv_memory)),
        *("--host", LOOPBACK, "--grpc-port", str(grpc_port), "--metrics-port", str(metrics_port)),
        *("--advertise-host", LOOPBACK),
        *("--drain-grace-s", str(STOP_GRACE_S)),
    )


def _cores_argv(placement: Placement, worker: int) -> tuple[str, ...]:
    cores = placement.cores[worker]
    return ("--cores", ",".join(map(str, cores))) if cores else ()


def _gpu_environ(placement: Placement, worker: int) -> dict[str, str]:
    return {"CUDA_VISIBLE_DEVICES": placement.gpus[worker]} if placement.gpus else {}


def _worker_addresses(grpc_port: int, metrics_port: int) -> dict[str, str]:
    return {"grpc": f"{LOOPBACK}:{grpc_port}", "metrics": f"{LOOPBACK}:{metrics_port}"}


def _more(config: UpConfig, role: str) -> list[str]:
    """The user's own flags come last, so that they win; of `both`, those of decode."""
    own = config.prefill_args if role == "prefill" else config.decode_args
    return shlex.split(config.worker_args) + shlex.split(own)


def _router(
    config: UpConfig,
    model: Model,
    workers: tuple[ProcessSpec, ...],
    log: Path,
    environ: Mapping[str, str],
    admin: tuple[str, Path],
) -> ProcessSpec:
    """`admin`: the address of its admin API, and the file with the token."""
    host = LOOPBACK if config.host in ("0.0.0.0", "::", "") else config.host
    address = f"[{host}]:{config.port}" if ":" in host else f"{host}:{config.port}"

    def addresses(role: str) -> str:
        roles = (role, "both")
        return ",".join(worker.addresses["grpc"] for worker in workers if worker.role in roles)

    argv = (
        *(sys.executable, "-m", ROUTER, "--host", config.host, "--port", str(config.port)),
        *("--mode", config.mode, "--model-path", model.path),
        *("--served-model-name", model.served_model_name),
        *("--prefill", addresses("prefill"), "--decode", addresses("decode")),
        *("--shutdown-grace-s", str(STOP_GRACE_S), "--ready-wait-s", str(RESTART_S)),
        *("--admin-port", admin[0].rpartition(":")[2], "--admin-token-file", str(admin[1])),
        *shlex.split(config.router_args),
    )
    return ProcessSpec(
        name="router",
        role="router",
        argv=argv,
        environ=environ,
        addresses={"http": address, "metrics": address, "admin": admin[0]},
        log=log,
    )
