import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from kvfabric.transport import Endpoint, open_transport
from tests.kvfabric.rig import SECONDS

SCHEMES = ("inproc", "ucx")


@pytest.fixture(params=SCHEMES)
def scheme(request: pytest.FixtureRequest) -> str:
    """Tests that take it run over every transport, in one process."""
    name: str = request.param
    return name


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def ucx_stays_up() -> AsyncIterator[None]:
    """One use of UCX for a module: it serves one loop, on which the module's tests run:
    `pytest.mark.asyncio(loop_scope="module")`."""
    transport = open_transport("ucx://")
    accepted: asyncio.Queue[Endpoint] = asyncio.Queue()
    listener = await transport.listen("ucx://127.0.0.1:0", accepted.put_nowait)
    (await transport.connect(listener.address, SECONDS)).abort()  # all of its threads are up now
    (await asyncio.wait_for(accepted.get(), SECONDS)).abort()
    listener.close()
    yield
    await transport.close()
