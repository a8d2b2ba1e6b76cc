"""The server that every worker stands on: statuses, health, reflection, lease and drain.

The services here take and give raw bytes: runtime knows no message.
"""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from structlog.testing import capture_logs

from runtime.grpc_client import open_channel
from runtime.grpc_errors import one_line
from runtime.grpc_server import CannotListen, GrpcServer, serve

NAME = "test.Echo"
Context = grpc.aio.ServicerContext[bytes, bytes]


class TooLong(ValueError):
    pass


class Echo:
    """Fails as it is told; knows how many streams it holds."""

    def __init__(self) -> None:
        self.streams = 0
        self.closed = asyncio.Event()

    async def once(self, request: bytes, context: Context) -> bytes:
        match request:
            case b"value":
                raise ValueError("line one\nline\ttwo")
            case b"too long":
                raise TooLong("9 > 8")
            case b"bug":
                raise KeyError("secret")
            case b"later":
                context.set_trailing_metadata((("retry", "9"),))
                raise TooLong("later")
            case b"abort":
                await context.abort(grpc.StatusCode.DATA_LOSS, "as it is")
        return request

    async def stream(self, request: bytes, context: Context) -> AsyncIterator[bytes]:
        self.streams += 1
        try:
            for _ in range(3):
                yield request
            if request == b"fail":
                raise TooLong("mid-stream")
            while request == b"flood":
                yield bytes(1 << 16)
            if request == b"hang":
                await asyncio.Event().wait()
        finally:
            if request == b"hang":
                await asyncio.sleep(0.1)  # a handler may take its time to let go
            self.streams -= 1
            self.closed.set()


def mounted(echo: Echo) -> GrpcServer:
    server = GrpcServer(
        {
            ValueError: grpc.StatusCode.INVALID_ARGUMENT,
            TooLong: grpc.StatusCode.OUT_OF_RANGE,
        }
    )
    handlers: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {
        "Once": grpc.unary_unary_rpc_method_handler(echo.once),
        "Stream": grpc.unary_stream_rpc_method_handler(echo.stream),
    }
    server.server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(NAME, handlers),))
    return server


@pytest.fixture
async def echo() -> Echo:
    return Echo()


@pytest.fixture
async def channel(echo: Echo) -> AsyncIterator[grpc.aio.Channel]:
    server = mounted(echo)
    port = await server.start("127.0.0.1:0", [NAME])
    async with open_channel(f"127.0.0.1:{port}") as channel:
        yield channel
    await server.stop(0)


def once(channel: grpc.aio.Channel, request: bytes) -> Any:
    call: Any = channel.unary_unary(f"/{NAME}/Once")
    return call(request, timeout=5)


def stream(channel: grpc.aio.Channel, request: bytes) -> Any:
    call: Any = channel.unary_stream(f"/{NAME}/Stream")
    return call(request, timeout=20)


@pytest.mark.parametrize(
    ("request_", "code", "details"),
    [
        (b"value", grpc.StatusCode.INVALID_ARGUMENT, "line one line two"),
        (b"too long", grpc.StatusCode.OUT_OF_RANGE, "9 > 8"),
        (b"abort", grpc.StatusCode.DATA_LOSS, "as it is"),
    ],
)
async def test_exceptions_become_statuses(
    channel: grpc.aio.Channel, request_: bytes, code: grpc.StatusCode, details: str
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await once(channel, request_)
    assert (caught.value.code(), caught.value.details()) == (code, details)


async def test_trailing_metadata_that_a_handler_has_set_goes_with_its_error(
    channel: grpc.aio.Channel,
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await once(channel, b"later")
    assert ("retry", "9") in list(caught.value.trailing_metadata())


async def test_a_bug_is_internal_with_an_id_and_the_log_has_the_same_id(
    channel: grpc.aio.Channel,
) -> None:
    with capture_logs() as logs, pytest.raises(grpc.aio.AioRpcError) as caught:
        await once(channel, b"bug")
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    details = caught.value.details() or ""
    assert "secret" not in details
    assert logs[0]["error_id"] == details.split()[-1]


async def test_a_stream_that_fails_delivers_what_it_had(
    channel: grpc.aio.Channel, echo: Echo
) -> None:
    call = stream(channel, b"fail")
    assert [await call.read() for _ in range(3)] == [b"fail"] * 3
    with pytest.raises(grpc.aio.AioRpcError, match="mid-stream") as caught:
        await call.read()
    assert caught.value.code() is grpc.StatusCode.OUT_OF_RANGE
    assert echo.streams == 0


@pytest.mark.parametrize("request_", [b"hang", b"flood"])
async def test_a_cancelled_stream_is_closed_at_once(
    channel: grpc.aio.Channel, echo: Echo, request_: bytes
) -> None:
    call = stream(channel, request_)
    assert await call.read() == request_
    assert echo.streams == 1
    call.cancel()
    with capture_logs() as logs:
        await asyncio.wait_for(echo.closed.wait(), 5)
    assert logs == []


async def test_health_and_reflection(channel: grpc.aio.Channel) -> None:
    stub = health_pb2_grpc.HealthStub(channel)
    for service in ("", NAME):
        reply = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=5)
        assert reply.status == health_pb2.HealthCheckResponse.SERVING
    with pytest.raises(grpc.aio.AioRpcError, match="NOT_FOUND"):
        await stub.Check(health_pb2.HealthCheckRequest(service="nobody"), timeout=5)
    ask = reflection_pb2.ServerReflectionRequest(list_services="")
    call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(
        iter([ask]), timeout=5
    )
    services = {s.name for s in (await call.read()).list_services_response.service}
    assert {NAME, "grpc.health.v1.Health"} <= services


async def test_unknown_methods_are_unimplemented(channel: grpc.aio.Channel) -> None:
    call: Any = channel.unary_unary("/no/Where")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call(b"", timeout=5)
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_a_taken_port_is_an_error(channel: grpc.aio.Channel) -> None:
    first, second = GrpcServer({}), GrpcServer({})
    port = await first.start("127.0.0.1:0", [])
    with pytest.raises(CannotListen, match=str(port)):
        await second.start(f"127.0.0.1:{port}", [])
    await first.stop(0)
    await second.stop(0)


@pytest.mark.parametrize(
    "end", [lambda _: os.kill(os.getpid(), signal.SIGTERM), asyncio.Event.set], ids=["term", "self"]
)
async def test_serve_drains_before_it_stops(
    echo: Echo, unused_tcp_port: int, end: Callable[[asyncio.Event], None]
) -> None:
    order: list[str] = []
    stopping = asyncio.Event()
    address = f"127.0.0.1:{unused_tcp_port}"

    async def on_drain() -> None:
        status = await health.Check(health_pb2.HealthCheckRequest(), timeout=5)
        assert status.status == health_pb2.HealthCheckResponse.NOT_SERVING
        order.append("drained")

    async with open_channel(address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        serving = asyncio.create_task(
            serve(mounted(echo), address, [NAME], stopping=stopping, on_drain=on_drain, grace_s=0.2)
        )
        call = stream(channel, b"hang")
        await call.wait_for_connection()
        await call.read()
        end(stopping)
        await asyncio.wait_for(serving, 5)
        order.append("stopped")
    assert order == ["drained", "stopped"]
    assert echo.streams == 0


def test_details_are_one_short_line() -> None:
    assert one_line("a\r\nb\x00\u2028c") == "a b c"
    assert len(one_line("x" * 9999)) == 1024
