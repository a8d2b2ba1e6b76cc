"""Says by its exit status whether the one Baton process in this container is well.

    python -m deploy.health

Asks, on loopback, the port that the environment names: BATON_PORT for a router (`/healthz`),
BATON_GRPC_PORT for a worker (gRPC health; with BATON_TLS_CERT and its like, by mutual TLS, for the
name in BATON_ADVERTISE_HOST). In a container one process runs, so one of them
answers: that one counts. For the HEALTHCHECK of the image.
"""

import http.client
import os
import sys

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from runtime.tls import TLS

_TIMEOUT_S = 3.0


def main() -> None:
    port, grpc_port = int(os.environ["BATON_PORT"]), int(os.environ["BATON_GRPC_PORT"])
    well = router_is_well(port) or worker_is_well(grpc_port)
    sys.exit(0 if well else 1)


def router_is_well(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_TIMEOUT_S)
    try:
        connection.request("GET", "/healthz")
        return connection.getresponse().status == http.client.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def worker_is_well(port: int) -> bool:
    with _channel(f"127.0.0.1:{port}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            reply = stub.Check(health_pb2.HealthCheckRequest(), timeout=_TIMEOUT_S)
        except grpc.RpcError:
            return False
        return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)


def _channel(target: str) -> grpc.Channel:
    files = (os.environ.get(f"BATON_TLS_{name}", "") for name in ("CERT", "KEY", "CA"))
    tls = TLS.from_files(*files)
    if tls is None:
        return grpc.insecure_channel(target)
    host = os.environ.get("BATON_ADVERTISE_HOST", "")
    options = [("grpc.ssl_target_name_override", host)] if host else []
    return grpc.secure_channel(target, tls.channel_credentials(), options)


if __name__ == "__main__":
    main()
