"""Mutual TLS on a gRPC link: who has no certificate of the cluster's authority gets nowhere."""

from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
import trustme
from grpc_health.v1 import health_pb2, health_pb2_grpc

from runtime.grpc_client import open_channel
from runtime.grpc_server import GrpcServer
from runtime.tls import TLS, BadTLS
from tests.tls_files import write_tls_files


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


def tls_of(folder: Path, authority: trustme.CA, *names: str) -> TLS:
    tls = TLS.from_files(*map(str, write_tls_files(folder, authority, *names)))
    assert tls is not None
    return tls


@pytest.fixture
async def port(tmp_path: Path, authority: trustme.CA) -> AsyncIterator[int]:
    server = GrpcServer({}, tls_of(tmp_path, authority, "localhost", "127.0.0.1"))
    yield await server.start("127.0.0.1:0", [])
    await server.stop(0)


async def check(target: str, tls: TLS | None) -> int:
    async with open_channel(target, tls) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        reply = await stub.Check(health_pb2.HealthCheckRequest(), timeout=5)
        return int(reply.status)


async def test_processes_of_one_cluster_talk(
    port: int, tmp_path: Path, authority: trustme.CA
) -> None:
    router = tls_of(tmp_path, authority, "router")
    assert await check(f"127.0.0.1:{port}", router) == health_pb2.HealthCheckResponse.SERVING


async def test_strangers_are_refused(port: int, tmp_path: Path, authority: trustme.CA) -> None:
    stranger = tls_of(tmp_path, trustme.CA(), "router")
    trusting = TLS(stranger.certificate, stranger.key, authority.cert_pem.bytes())
    for tls in (None, stranger, trusting):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await check(f"127.0.0.1:{port}", tls)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_server_of_another_name_is_not_believed(
    tmp_path: Path, authority: trustme.CA
) -> None:
    server = GrpcServer({}, tls_of(tmp_path, authority, "somebody-else"))
    port = await server.start("127.0.0.1:0", [])
    with pytest.raises(grpc.aio.AioRpcError):
        await check(f"127.0.0.1:{port}", tls_of(tmp_path, authority, "router"))
    await server.stop(0)


def test_files_that_cannot_be_used_are_named(tmp_path: Path, authority: trustme.CA) -> None:
    cert, key, ca = map(str, write_tls_files(tmp_path, authority, "a"))
    other_key = str(write_tls_files(tmp_path / "other", authority, "b")[1])
    junk = tmp_path / "junk.pem"
    junk.write_text("-----BEGIN NONSENSE-----")
    assert TLS.from_files("", "", "") is None
    for files, word in (
        ((cert, "", ca), "go together"),
        ((cert, other_key, ca), other_key),
        ((str(junk), key, ca), "junk.pem"),
        ((cert, key, str(junk)), "--tls-ca"),
        ((cert, str(tmp_path / "missing"), ca), "missing"),
    ):
        with pytest.raises(BadTLS, match=word):
            TLS.from_files(*files)
