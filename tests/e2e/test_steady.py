"""Ten minutes of mixed load with rare faults: no process grows. BATON_SOAK_S is another time, in
seconds; what shows sooner, threads and files, is looked for in test_injected_faults.py.
"""

import os

import pytest

from tests.e2e.harmed import HarmedCluster
from tests.e2e.soak import assert_no_more_threads_or_files, soak

SOAK_S = float(os.environ.get("BATON_SOAK_S") or 600)
MAX_SLOPE = 4 << 20
"""Bytes a minute, of a run that is long enough to tell: `LONG_S`."""
LONG_S = 300.0


@pytest.mark.long
@pytest.mark.timeout(SOAK_S + 120)
async def test_nothing_grows(harmed: HarmedCluster) -> None:
    watched = await soak(harmed, SOAK_S)
    assert_no_more_threads_or_files(watched)
    for looks in watched:
        assert SOAK_S < LONG_S or looks.slope < MAX_SLOPE
