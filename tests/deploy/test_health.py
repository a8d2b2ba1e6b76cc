"""A container is well when its one process answers."""

import asyncio
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
import trustme

from deploy.health import router_is_well, worker_is_well
from runtime.grpc_server import GrpcServer
from runtime.tls import TLS
from tests.tls_files import write_tls_files


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/healthz" else 404)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def http_port() -> Iterator[int]:
    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


def test_router(http_port: int, unused_tcp_port: int) -> None:
    assert router_is_well(http_port)
    assert not router_is_well(unused_tcp_port)
    assert not worker_is_well(http_port)


async def test_worker(unused_tcp_port: int) -> None:
    server = GrpcServer({})
    port = await server.start("127.0.0.1:0", [])
    assert await asyncio.to_thread(worker_is_well, port)
    assert not await asyncio.to_thread(router_is_well, port)
    await server.drain()
    assert not await asyncio.to_thread(worker_is_well, port)
    await server.stop(0)
    assert not await asyncio.to_thread(worker_is_well, unused_tcp_port)


async def test_worker_with_mutual_tls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = tuple(map(str, write_tls_files(tmp_path, trustme.CA(), "decode-0")))
    server = GrpcServer({}, TLS.from_files(*files))
    port = await server.start("127.0.0.1:0", [])
    assert not await asyncio.to_thread(worker_is_well, port)
    for name, file in zip(("CERT", "KEY", "CA"), files, strict=True):
        monkeypatch.setenv(f"BATON_TLS_{name}", file)
    monkeypatch.setenv("BATON_ADVERTISE_HOST", "decode-0")
    assert await asyncio.to_thread(worker_is_well, port)
    await server.stop(0)
