"""The `/metrics` endpoint of a worker, and the buckets in which every process counts seconds.

A process makes one registry and hands it to whoever defines metrics; nothing uses the global one.
The router serves its registry from its own web app, a worker with `MetricsServer`.
"""

import contextlib
import socket
from typing import Self

import prometheus_client
from prometheus_client import CollectorRegistry, Histogram, ProcessCollector

TTFT_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""Buckets for time to first token, and for queues."""

ITL_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.035, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
"""Buckets for inter-token latency and time per output token."""

REQUEST_SECONDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
"""Buckets for whole requests."""

STAGE_SECONDS = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0, 30.0,
)  # fmt: skip
"""Buckets for the stages of a handoff: build, pack, ship, install, attach."""

LOOP_WAIT_SECONDS = (0.0001, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)
"""Buckets for how late an event loop turns to what is ready."""


def new_registry() -> CollectorRegistry:
    """A registry that already tells the process's own memory, CPU time and open files."""
    registry = CollectorRegistry(auto_describe=True)
    ProcessCollector(registry=registry)
    return registry


class MetricsServer:
    """Serves a registry over HTTP from a thread of its own until it is closed.

    `port` 0 takes a free one; `MetricsServer.port` tells which. Raises `OSError` if it is taken.
    """

    def __init__(self, registry: CollectorRegistry, *, host: str, port: int) -> None:
        self._server, self._thread = prometheus_client.start_http_server(
            port, addr=host, registry=registry
        )
        self.port = self._server.server_port

    def close(self) -> None:
        """Stops answering, closes the socket and joins the thread."""
        with contextlib.suppress(OSError):  # wakes the thread: it looks up twice a second only
            self._server.socket.shutdown(socket.SHUT_RDWR)
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class HandoffStages:
    """The five stages of a KV handoff: build, pack and ship on prefill, install and attach on
    decode. One histogram a process, whichever services it mounts."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._seconds = Histogram(
            "baton_handoff_stage_seconds",
            "Stages of a request's handoff: build (compute), pack (gather into slots, summed), "
            "ship (first frame handed to the network to last slot free), install (scatter into "
            "blocks, summed), attach (last frame installed to joining the batch).",
            ["stage"],
            registry=registry,
            buckets=STAGE_SECONDS,
        )

    def observe(self, stage: str, ns: int) -> None:
        self._seconds.labels(stage).observe(ns / 1e9)
