"""Real processes for end-to-end tests: workers and a router on loopback, under the test's control.

A `Cluster` starts them one by one, so that a test can kill, stop or restart each; closing it ends
all of them, and fails the test if one does not end well.
"""

import contextlib
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import grpc
import httpx
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client.parser import text_string_to_metric_families

from protos import serving_pb2 as pb
from protos import serving_pb2_grpc as pb_grpc
from tests.e2e.process import ClusterProcess
from tests.ports import free_port

MODEL_NAME = "tested"
ALWAYS_REMOTE = {"served_model_name": MODEL_NAME, "prefill_at": "remote"}
"""What is tested is the relay: a prompt is not to stay on decode because it is quicker there."""
UCX_ALONE = {"UCX_TLS": "^cma"}
"""For workers whose frames are to go by UCX, as between hosts: on one host they need not."""
TASKS_A_WATCHER = 2
"""Its handler's and grpc's own: routers come and go between tests."""


class Metrics(dict[tuple[str, tuple[tuple[str, str], ...]], float]):
    """A scrape: (sample name, sorted labels) → value."""

    def value(self, name: str, **labels: str) -> float:
        return self.get((name, tuple(sorted(labels.items()))), 0.0)


def scrape(url: str) -> Metrics:
    text = httpx.get(url, timeout=5.0).raise_for_status().text
    return Metrics(
        {
            (sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }
    )


class WorkerProcess(ClusterProcess):
    """A prefill or decode worker."""

    def __init__(
        self,
        role: str,
        name: str,
        log: Path,
        flags: dict[str, object],
        prefix: Sequence[str] = (),
        environ: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """`prefix`, `environ`: see ClusterProcess."""
        self.role = role
        self.num_ranks = int(str(flags.get("tensor_parallel", 1)))
        self._host = str(flags.get("host", "127.0.0.1"))
        self.grpc_address = f"{self._host}:{free_port()}"
        self._metrics_port = free_port()
        argv = [
            *("deploy.worker", "--role", role, "--name", name),
            *("--grpc-port", self.grpc_address.rpartition(":")[2]),
            *("--metrics-port", str(self._metrics_port)),
            *("--drain-grace-s", "1"),
        ]
        for key, value in flags.items():
            name_of_flag = key.replace("_", "-")
            if isinstance(value, bool):
                argv.append(f"--{name_of_flag}" if value else f"--no-{name_of_flag}")
            else:
                argv += [f"--{name_of_flag}", str(value)]
        super().__init__(name, argv, log, prefix, environ)

    def wait_ready(self) -> None:
        self.wait_until(self._is_serving, "serving")

    def metrics(self) -> Metrics:
        return scrape(f"http://{self._host}:{self._metrics_port}/metrics")

    def status(self) -> pb.WorkerStatus:
        with grpc.insecure_channel(self.grpc_address) as channel:
            stub = (pb_grpc.PrefillStub if self.role == "prefill" else pb_grpc.DecodeStub)(channel)
            status: pb.WorkerStatus = stub.Status(pb.StatusRequest(), timeout=5.0)
            return status

    def _is_serving(self) -> bool:
        with grpc.insecure_channel(self.grpc_address) as channel:
            try:
                reply = health_pb2_grpc.HealthStub(channel).Check(
                    health_pb2.HealthCheckRequest(), timeout=1.0
                )
            except grpc.RpcError:
                return False
            return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)


class RouterProcess(ClusterProcess):
    """The router."""

    def __init__(
        self,
        log: Path,
        prefill: Sequence[WorkerProcess],
        decode: Sequence[WorkerProcess],
        flags: dict[str, object],
    ) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self.admin_url = f"http://127.0.0.1:{flags.get('admin_port', 0)}"
        argv = [
            *("router", "--port", str(port)),
            *("--prefill", ",".join(worker.grpc_address for worker in prefill)),
            *("--decode", ",".join(worker.grpc_address for worker in decode)),
        ]
        for key, value in flags.items():
            argv += [f"--{key.replace('_', '-')}", str(value)]
        super().__init__("router", argv, log)
        self._num_workers = {"prefill": len(prefill), "decode": len(decode)}

    def wait_ready(self) -> None:
        self.wait_until(self._is_ready, "ready")

    def wait_knows_all(self) -> None:
        """Returns when it would send requests to every worker; one of each role makes it ready."""
        self.wait_until(self._knows_all, "aware of all workers")

    def metrics(self) -> Metrics:
        return scrape(f"{self.url}/metrics")

    def _knows_all(self) -> bool:
        metrics = self.metrics()
        return all(
            metrics.value("baton_workers_ready", role=role) == number
            for role, number in self._num_workers.items()
        )

    def _is_ready(self) -> bool:
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(f"{self.url}/readyz", timeout=1.0).status_code == 200
        return False


class Cluster:
    """Starts processes; `close` ends them."""

    def __init__(self, run_dir: Path, model_path: Path, **worker_flags: object) -> None:
        self.run_dir = run_dir
        self.model_path = model_path
        self.workers: list[WorkerProcess] = []
        self._idle_tasks: dict[str, float] = {}
        self.routers: list[RouterProcess] = []
        self._worker_flags = worker_flags
        self.worker_environ: Mapping[str, str] = MappingProxyType({})
        """Of the workers that are started from here on."""

    def worker(self, role: str, prefix: Sequence[str] = (), **flags: object) -> WorkerProcess:
        """Starts a worker; call `wait_ready` before its first use."""
        name = f"{role}-{sum(1 for worker in self.workers if worker.role == role)}"
        flags = {"model_path": self.model_path, "fabric_floor": 0, **self._worker_flags, **flags}
        log = self.run_dir / f"{name}.log"
        worker = WorkerProcess(role, name, log, flags, prefix, self.worker_environ)
        self.workers.append(worker)
        return worker

    def router(self, over: Sequence[WorkerProcess] | None = None, **flags: object) -> RouterProcess:
        """Starts a router over these workers; default: all so far."""
        log = self.run_dir / f"router-{len(self.routers)}.log"
        workers = self.workers if over is None else over
        takes_prefills = flags.get("mode") != "colocated"
        router = RouterProcess(
            log,
            [worker for worker in workers if worker.role == "prefill" and takes_prefills],
            [worker for worker in workers if worker.role == "decode"],
            {**ALWAYS_REMOTE, "model_path": self.model_path, **flags},
        )
        self.routers.append(router)
        return router

    def wait_ready(self) -> None:
        for process in [*self.workers, *self.routers]:
            process.wait_ready()
        for router in self.routers:
            router.wait_knows_all()
        self.assert_all_back()

    def assert_all_back(self, within_s: float = 2.0) -> None:
        """Every block, slot, transfer, request and task of every living worker is back in time,
        and no connection to a dead one is left. The first call takes idle workers as they are."""
        deadline = time.monotonic() + within_s
        for worker in self.workers:
            if not worker.is_running:
                continue
            while leaks := self._leaks(worker):
                assert time.monotonic() < deadline, f"{worker.name} still has {leaks}"
                time.sleep(0.05)

    def _leaks(self, worker: WorkerProcess) -> list[str]:
        status, metrics = worker.status(), worker.metrics()
        tasks = metrics.value("baton_service_tasks")
        tasks -= TASKS_A_WATCHER * metrics.value("baton_state_watchers")
        idle_tasks = self._idle_tasks.setdefault(f"{worker.name}/{worker.pid}", tasks)
        peers = [other for other in self.workers if other.is_running and other is not worker]
        living = worker.num_ranks * sum(other.num_ranks for other in peers)
        counts = {
            "blocks": status.num_blocks
            - (status.blocks.free + status.blocks.cached + status.blocks.pinned),
            "send slots": status.fabric.send_slots_used,
            "recv slots": status.fabric.recv_slots_used,
            "transfers": status.fabric.transfers,
            "requests": status.num_waiting + status.num_running + status.num_awaiting_kv,
            "tasks": max(0, tasks - idle_tasks),
            "violations of the ledger": sum(
                metrics.value("baton_ledger_violations_total", of=what)
                for what in ("blocks", "slots")
            ),
            "endpoints to the dead": max(0, status.fabric.endpoints - living),
        }
        return [f"{count} {what}" for what, count in counts.items() if count]

    def close(self) -> None:
        failures = []
        processes = [process for process in [*self.routers, *self.workers] if process.is_running]
        for process in processes:
            process.ask_to_end()
        for process in processes:
            try:
                process.wait_end()
            except AssertionError as failure:
                failures.append(str(failure))
        assert not failures, "\n".join(failures)


def children_of(pid: int) -> list[int]:
    """Pids of the direct children of a process."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError, IndexError):
                stat = Path(f"/proc/{entry}/stat").read_text()
                if int(stat.rpartition(")")[2].split()[1]) == pid:
                    found.append(int(entry))
    return found
