"""The endpoint answers, and closes for good."""

import threading
import time
import urllib.request

import pytest
from prometheus_client import Counter

from runtime import metrics


def test_serves_its_registry_until_closed() -> None:
    threads = set(threading.enumerate())
    registry = metrics.new_registry()
    Counter("baton_things", "Things.", registry=registry).inc()
    with metrics.MetricsServer(registry, host="127.0.0.1", port=0) as server:
        with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics") as reply:
            text = reply.read().decode()
        with pytest.raises(OSError, match="in use"):
            metrics.MetricsServer(metrics.new_registry(), host="127.0.0.1", port=server.port)
    assert "baton_things_total 1.0" in text
    assert "process_resident_memory_bytes" in text
    assert set(threading.enumerate()) <= threads
    metrics.MetricsServer(registry, host="127.0.0.1", port=server.port).close()


def test_closes_at_once() -> None:
    """Its thread would look up twice a second: nobody waits for that."""
    seconds = []
    for _ in range(3):
        server = metrics.MetricsServer(metrics.new_registry(), host="127.0.0.1", port=0)
        began = time.monotonic()
        server.close()
        seconds.append(time.monotonic() - began)
    assert min(seconds) < 0.2


@pytest.mark.parametrize(
    "buckets",
    [
        metrics.TTFT_SECONDS,
        metrics.ITL_SECONDS,
        metrics.REQUEST_SECONDS,
        metrics.STAGE_SECONDS,
        metrics.LOOP_WAIT_SECONDS,
    ],
)
def test_buckets_grow(buckets: tuple[float, ...]) -> None:
    assert list(buckets) == sorted(set(buckets))
