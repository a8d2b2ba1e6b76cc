"""The fabric's self-test: real UCX, a real child."""

import asyncio
import sys
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from structlog.testing import capture_logs

from deploy import self_test
from kvfabric.config import FabricConfig
from kvfabric.fabric import Fabric

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def fabric() -> AsyncIterator[Fabric]:
    """Tested once: all of UCX's threads are up from then on."""
    config = FabricConfig(
        listen="ucx://127.0.0.1:0", fingerprint=b"f" * 32, generation=7, slot_nbytes=1 << 20
    )
    fabric = Fabric(config, memoryview(bytearray(config.staging_nbytes)))
    fabric.start()
    with capture_logs() as logs:
        outcome = await self_test.run(fabric, floor_nbytes_per_s=1)
    assert outcome is not None
    assert outcome.nbytes_per_s > 1e6
    assert outcome.transports, "UCX told which"
    assert [line["log_level"] for line in logs] == ["info"]
    yield fabric
    await asyncio.to_thread(fabric.close)


async def test_it_leaves_nothing_behind(fabric: Fabric) -> None:
    stats = fabric.stats()
    assert (stats.recv_slots_used, stats.expected_transfers) == (0, 0)
    assert stats.received_frames == self_test.NUM_FRAMES


async def test_under_the_floor_it_warns(fabric: Fabric) -> None:
    with capture_logs() as logs:
        assert await self_test.run(fabric, floor_nbytes_per_s=1e15) is not None
    (line,) = logs
    assert line["log_level"] == "warning"
    assert line["floor_mb_per_s"] == 1e9


async def test_a_child_that_cannot_ship_is_a_warning(
    fabric: Fabric, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with capture_logs() as logs:
        assert await self_test.run(fabric, floor_nbytes_per_s=1) is None
    assert [line["log_level"] for line in logs] == ["warning"]
    await asyncio.wrap_future(fabric.call(asyncio.sleep(0)))  # what was asked before is done
    assert fabric.stats().expected_transfers == 0
