"""A worker's gRPC server: keepalive, errors as status codes, health, reflection, graceful end.

1. `GrpcServer(errors)`; the services are added to its `.server`.
2. `start(address, services)`: listens, and health says SERVING for each service and for "".
3. `drain()`: health says NOT_SERVING for good; calls still run.
4. `stop(grace_s)`: no new call; running ones have `grace_s` to end, then they are cancelled.

`serve` does 2 to 4, until a signal or its caller ends it. Handlers raise exceptions; the error
table says which status each becomes. Knows none of the services.
"""

import asyncio
import signal
from collections.abc import Awaitable, Callable, Sequence

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from runtime.grpc_client import KEEPALIVE_S, MAX_MESSAGE_NBYTES
from runtime.grpc_errors import ErrorTable, ErrorTranslator
from runtime.log import get_logger
from runtime.tls import TLS

log = get_logger()

_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.keepalive_time_ms", int(KEEPALIVE_S * 1000)),
    ("grpc.keepalive_timeout_ms", int(KEEPALIVE_S * 1000)),
    # The deadline that really counts for the ping's answer; a minute, unless told.
    ("grpc.http2.ping_timeout_ms", int(KEEPALIVE_S * 1000)),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # Clients ping every KEEPALIVE_S; without this the server takes that for abuse.
    ("grpc.http2.min_ping_interval_without_data_ms", int(KEEPALIVE_S * 500)),
    ("grpc.max_send_message_length", MAX_MESSAGE_NBYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_NBYTES),
    # Two workers on one port must be an error, not a lottery.
    ("grpc.so_reuseport", 0),
)

_LET_GO_S = 1.0


class CannotListen(Exception):
    """The address is taken, or is not one of this machine's."""


class GrpcServer:
    """A `grpc.aio` server with all that Baton's workers have in common."""

    def __init__(self, errors: ErrorTable, tls: TLS | None = None) -> None:
        self._tls = tls
        self._translator = ErrorTranslator(errors)
        self.server = grpc.aio.server(interceptors=[self._translator], options=_OPTIONS)
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.server)

    async def start(self, address: str, services: Sequence[str]) -> int:
        """Listens on `host:port` and returns the port (0 asks for a free one).

        `services` are full names, as in `DESCRIPTOR.services_by_name["Decode"].full_name`.
        Raises CannotListen.
        """
        reflection.enable_server_reflection(
            [*services, health.SERVICE_NAME, reflection.SERVICE_NAME], self.server
        )
        try:
            port = self._add_port(address)
        except RuntimeError as error:
            raise CannotListen(f"cannot listen on {address}") from error
        await self.server.start()
        for service in services:
            await self._health.set(service, health_pb2.HealthCheckResponse.SERVING)
        return port

    def _add_port(self, address: str) -> int:
        if self._tls is None:
            return self.server.add_insecure_port(address)
        return self.server.add_secure_port(address, self._tls.server_credentials())

    async def drain(self) -> None:
        """Tells whoever watches health that nothing new should come."""
        await self._health.enter_graceful_shutdown()

    async def stop(self, grace_s: float) -> None:
        """Refuses new calls, cancels those that have not ended within `grace_s`, and waits a
        moment for their handlers to give back what they hold: grpc itself does not."""
        await self.server.stop(grace_s)
        if calls := self._translator.calls:
            await asyncio.wait(calls, timeout=_LET_GO_S)


async def serve(
    server: GrpcServer,
    address: str,
    services: Sequence[str],
    *,
    stopping: asyncio.Event,
    on_drain: Callable[[], Awaitable[None]] | None = None,
    grace_s: float = 3.0,
) -> None:
    """Serves until SIGTERM, SIGINT or `stopping`, then drains (`on_drain` is awaited after health
    has turned) and stops. Raises CannotListen. Must run in the main thread."""
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, stopping.set)
    try:
        port = await server.start(address, services)
        log.info("serving", address=address, port=port, services=",".join(services))
        await stopping.wait()
        log.info("draining", grace_s=grace_s)
        await server.drain()
        if on_drain is not None:
            await on_drain()
    finally:
        await server.stop(grace_s)
        for signum in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(signum)
