"""A worker process: one engine, one fabric, and both services around them.

Which of the services take calls is its duty (runtime/duty.py): a role that flips reloads nothing.

The only module that may import both worker services. Started as `python -m deploy.worker`:

1. Pin to the cores given, start the other ranks (deploy/ranks.py), load the model, start the
   fabric's thread.
2. Start the engine thread and the gRPC server; ready when health says SERVING.
3. On SIGTERM refuse new calls, let running ones end, send those that do not end in time elsewhere,
   then stop server, fabric and engine.
4. If the engine fails, end the process: whoever supervises it starts another.
"""

import asyncio
import faulthandler
import gc
import logging
import os
import signal
import sys
from contextlib import closing
from pathlib import Path
from typing import NoReturn

import grpc
from prometheus_client import CollectorRegistry, Gauge

import decode_server
import prefill_server
from deploy import cache_service, duty_service, self_test
from deploy import install_pace as pacing
from deploy.leaf_configs import engine_config, fabric_config
from deploy.rank_metrics import RanksCollector
from deploy.ranks import RankProcesses, of_rank, pin, rank_processes
from deploy.state_stream import StateStream
from deploy.worker_config import WorkerConfig
from deploy.worker_ledger import WorkerLedger
from deploy.worker_memory import memory_mb
from deploy.worker_metrics import (
    WorkerCollector,
    count_watchers,
    loop_wait_histogram,
    watch_tasks,
)
from deploy.worker_status import ROLES, WorkerStatus, new_generation
from engine.async_engine import AsyncEngine
from engine.config import ModelConfig, ModelError
from engine.engine import Engine
from engine.errors import EngineStopped, InvalidRequest, QueueFull, RequestTooLong
from engine.tp.ranks import RankLost
from kvfabric.errors import FabricError, HandshakeRefused
from kvfabric.fabric import Fabric
from kvfabric.frame import WIRE_VERSION
from kvfabric.node import check_framable
from kvfabric.ranks.fabric import RankedFabric
from kvfabric.ticket import KVShape
from runtime import flags, log
from runtime.call import Draining
from runtime.duty import Duty
from runtime.grammar import UnusableTokenizer, Vocabulary
from runtime.grpc_errors import ErrorTable
from runtime.grpc_server import CannotListen, GrpcServer, serve
from runtime.metrics import HandoffStages, MetricsServer, new_registry
from runtime.tls import TLS, BadTLS

ERRORS: ErrorTable = {
    InvalidRequest: grpc.StatusCode.INVALID_ARGUMENT,
    RequestTooLong: grpc.StatusCode.INVALID_ARGUMENT,
    QueueFull: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Draining: grpc.StatusCode.UNAVAILABLE,
    EngineStopped: grpc.StatusCode.UNAVAILABLE,
    TimeoutError: grpc.StatusCode.DEADLINE_EXCEEDED,
    HandshakeRefused: grpc.StatusCode.FAILED_PRECONDITION,
    FabricError: grpc.StatusCode.ABORTED,
}

SENDING_AWAY_S = 0.2
"""Before the grace is over: time for calls to be told that they shall go elsewhere."""

logger = log.get_logger()


def main() -> None:
    config = flags.parse(
        WorkerConfig,
        prog="python -m deploy.worker",
        description="A worker of Baton, for prefill, decode or both.",
    )
    faulthandler.register(signal.SIGUSR1)  # kill -USR1 writes all stacks into the log
    log.configure(config.name, format=config.log_format, level=config.log_level)
    status = 1
    try:
        run(config)
        status = 0
    except (ModelError, RankLost, CannotListen, BadTLS, FabricError, OSError, ValueError) as error:
        logger.error("cannot start", error=str(error))
        status = 2
    except Exception:
        logger.exception("failed")
        raise
    finally:
        _leave(status)


def _leave(status: int) -> NoReturn:
    """Ends the process without the interpreter's own end: all is closed by now, and collecting what
    UCX left in cycles may wait for UCX for seconds, with the GIL."""
    logging.shutdown()
    os._exit(status)


def run(config: WorkerConfig) -> None:
    """Runs a worker until it is told to stop, or its engine fails (exit status 1)."""
    pacing.check(config)
    with rank_processes(config) as processes:
        config = of_rank(config, 0)
        pin(config)
        settings = engine_config(config, processes.shard)
        with closing(processes.connect(settings.resolve_device())) as ranks:
            engine = Engine(
                settings,
                wire_version=WIRE_VERSION,
                vocabulary=_vocabulary(settings.model_path),
                ranks=ranks,
            )
            _run(config, engine, processes)
    if engine.failure is not None:
        logger.error("engine failed", error=str(engine.failure))
        sys.exit(1)


def _run(config: WorkerConfig, engine: Engine, processes: RankProcesses) -> None:
    generation = new_generation()
    settings = fabric_config(config, engine.fingerprint, engine.kv_facts, generation)
    if config.inject_faults:
        logger.warning("messages of the fabric are harmed on purpose", rules=config.inject_faults)
    check_framable(KVShape(*engine.kv_shape), settings)
    gc.freeze()  # modules and model stay: no collection in the midst of a step needs to walk them
    staging = engine.copier.allocate_staging(settings.staging_nbytes)
    ends = [other.handoff for other in processes.others]
    if ends:
        fabric: Fabric = RankedFabric(settings, staging, ends)
    else:
        fabric = Fabric(settings, staging, pacing.install_pace(config, engine))
    fabric.start()
    logger.info("memory", **memory_mb(engine, settings.staging_nbytes))
    try:
        asyncio.run(_serve(config, engine, fabric, generation, processes))
    finally:
        gc.disable()  # see _leave
        fabric.close()
        engine.stop()
        gc.enable()


async def _serve(
    config: WorkerConfig,
    engine: Engine,
    fabric: Fabric,
    generation: int,
    processes: RankProcesses,
) -> None:
    registry = new_registry()
    registry.register(WorkerCollector(engine, fabric))
    registry.register(RanksCollector(engine, fabric, processes))
    watch_tasks(registry, asyncio.get_running_loop())
    duty = Duty(config.name, ROLES if config.role == "both" else [config.role])
    model = Path(config.model_path).name
    status = WorkerStatus(config.name, model, engine, fabric, generation, duty)
    stopping = asyncio.Event()
    async_engine = AsyncEngine(engine, loop_wait_histogram(registry).observe, stopping.set)
    server = GrpcServer(ERRORS, TLS.from_files(config.tls_cert, config.tls_key, config.tls_ca))
    stages = HandoffStages(registry)
    ledger = WorkerLedger(config.name, async_engine, fabric, generation)
    states = StateStream(async_engine, status)
    duty.on_change = states.wake
    count_watchers(registry, async_engine.watchers)
    services = duty_service.add_services(server.server, duty)
    services += cache_service.add_services(server.server, engine)
    for add_services in (decode_server.add_services, prefill_server.add_services):
        services += add_services(
            server.server,
            *(async_engine, fabric, status, states.watch, ledger, registry, stages, duty),
        )
    engine.start()

    async def on_drain() -> None:
        duty.assign((), max(0.0, config.drain_grace_s - SENDING_AWAY_S))
        states.stop()

    testing = asyncio.create_task(_test_fabric(fabric, config.fabric_floor, status, registry))
    with MetricsServer(registry, host=config.host, port=config.metrics_port) as metrics:
        logger.info("metrics", host=config.host, port=metrics.port, fabric=fabric.address)
        await serve(
            server,
            f"{config.host}:{config.grpc_port}",
            services,
            stopping=stopping,
            on_drain=on_drain,
            grace_s=config.drain_grace_s,
        )
    testing.cancel()
    await asyncio.wait({testing})


async def _test_fabric(
    fabric: Fabric, floor: int, status: WorkerStatus, registry: CollectorRegistry
) -> None:
    """Beside the first requests, if there are any: a worker does not wait for it."""
    if floor and (outcome := await self_test.run(fabric, floor)):
        status.shipped(outcome.nbytes_per_s)
        Gauge(
            "baton_fabric_self_test_bytes_per_second",
            "What the fabric's self-test at the start has shipped within this host.",
            registry=registry,
        ).set(outcome.nbytes_per_s)


def _vocabulary(model_path: Path) -> Vocabulary | None:
    """The bytes of the tokens, for grammars: the one thing here that knows text."""
    model = ModelConfig.from_folder(model_path)
    if not model.eos_token_ids:
        logger.warning("no structured outputs", reason="the model has no end token")
        return None
    try:
        return Vocabulary.from_folder(model_path, model.vocab_size, model.eos_token_ids)
    except UnusableTokenizer as error:
        logger.warning("no structured outputs", reason=str(error))
        return None


if __name__ == "__main__":
    main()
