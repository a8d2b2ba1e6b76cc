"""What the router's tests share: a model folder, configs with short deadlines, leak checks."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry

from router.app import Router, build_app
from router.http_tls import HttpTLS
from router.server import RouterServer
from router.tokenizer import TextTokenizer
from tests.router.configs import config_for, tasks_of_router
from tests.router.dispatch_bench import StartBench, bench_over_fakes
from tests.router.fake_workers import FakeCluster, until
from tests.router.model_folder import write_model_folder
from tests.router.served_fakes import ANSWER as ANSWER
from tests.router.served_fakes import served_fakes


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def tokenizer(model_folder: Path) -> TextTokenizer:
    return TextTokenizer.from_folder(model_folder)


@pytest.fixture
def answer(tokenizer: TextTokenizer) -> tuple[int, ...]:
    """The tokens of ANSWER."""
    return tokenizer.encode(ANSWER)


class _Hurry:
    """asyncio, as uvicorn's server sees it here."""

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds / 20)


@pytest.fixture(scope="session", autouse=True)
def servers_end_at_once() -> Iterator[None]:
    """uvicorn looks ten times a second whether it shall end, and then whether it has: a fifth of a
    second for each of a thousand tests that start a router."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("uvicorn.server.asyncio", _Hurry())
        yield


@dataclass
class RunningRouter:
    http: httpx.AsyncClient
    url: str
    router: Router
    registry: CollectorRegistry
    server: RouterServer

    def metric(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(name, labels) or 0.0

    async def post(self, path: str, **body: object) -> httpx.Response:
        return await self.http.post(path, json={"model": "tiny", **body})

    async def complete(self, **body: object) -> httpx.Response:
        return await self.post("/v1/completions", **{"prompt": "Hi", "max_tokens": 50, **body})

    async def chat(self, **body: object) -> httpx.Response:
        messages = [{"role": "user", "content": "Capital of France?"}]
        return await self.post("/v1/chat/completions", **{"messages": messages, **body})


StartRouter = Callable[..., AbstractAsyncContextManager[RunningRouter]]


@pytest.fixture
def start_router(tokenizer: TextTokenizer) -> StartRouter:
    """`async with start_router(cluster, **config) as running`: a real server on a loopback port.
    Afterwards nothing of any request is left, in the router or on the workers."""

    @asynccontextmanager
    async def start(
        cluster: FakeCluster, tls: tuple[HttpTLS, ssl.SSLContext] | None = None, **changes: object
    ) -> AsyncIterator[RunningRouter]:
        registry = CollectorRegistry()
        config = config_for(cluster, **changes)
        app = build_app(config, tokenizer, registry)
        server = RouterServer(
            app,
            host="127.0.0.1",
            port=0,
            grace_s=0.3,
            head_timeout_s=config.head_timeout_s,
            send_timeout_s=config.send_timeout_s,
            tls=tls[0] if tls is not None else None,
        )
        serving = asyncio.create_task(server.serve())
        await until(lambda: server.started)
        port = server.servers[0].sockets[0].getsockname()[1]
        url = f"{'http' if tls is None else 'https'}://127.0.0.1:{port}"
        verify = True if tls is None else tls[1]
        try:
            async with httpx.AsyncClient(base_url=url, timeout=10, verify=verify) as http:
                running = RunningRouter(http, url, app.state.router, registry, server)
                there = {worker.address for worker in cluster.workers if worker.server}
                known = [one for one in app.state.router.workers.everyone if one.address in there]
                await until(lambda: all(worker.num_refreshes for worker in known))
                yield running
                await until(lambda: running.metric("baton_requests_in_flight") == 0)
                await until(lambda: cluster.relay.num_open_calls == 0)
        finally:
            server.should_exit = True
            await serving
        assert not tasks_of_router()

    return start


@pytest.fixture
def start_bench() -> StartBench:
    return bench_over_fakes


@pytest.fixture(scope="session")
def served_url(model_folder: Path) -> Iterator[str]:
    """Of a router over fake workers, in a process of its own."""
    with served_fakes(model_folder) as url:
        yield url
