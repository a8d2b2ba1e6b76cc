"""A router's configuration for tests, with short deadlines, and what must not be left of it."""

import asyncio
import inspect
from dataclasses import replace
from pathlib import Path

import router
from router.config import RouterConfig
from tests.router.fake_workers import FakeCluster


def config_for(cluster: FakeCluster, **changes: object) -> RouterConfig:
    config = RouterConfig(
        model_path="",
        served_model_name="tiny",
        decode=tuple(worker.address for worker in cluster.decodes),
        prefill=tuple(worker.address for worker in cluster.prefills),
        port=0,
        status_interval_s=0.05,
        status_timeout_s=0.5,
        inactivity_s=0.4,
        ready_wait_s=0.5,
        renew_timeout_s=0.5,
        request_timeout_s=5.0,
        shutdown_grace_s=0.3,
    )
    return replace(config, **changes)  # type: ignore[arg-type]


def tasks_of_router() -> list[str]:
    """Coroutines of the router's own that are still running as tasks."""
    folder = str(Path(router.__file__).parent)
    coroutines = [task.get_coro() for task in asyncio.all_tasks()]
    return [
        repr(coroutine)
        for coroutine in coroutines
        if inspect.iscoroutine(coroutine) and coroutine.cr_code.co_filename.startswith(folder)
    ]
