"""Two workers of each role under steady load, while they are killed, frozen, ended, drained and
flipped at random and others join and leave: no client notices more than time, or is refused before
its first token. Dated results stand in docs/log.md.
"""

import asyncio
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from deploy.admin import Admin
from tests.e2e.answers import KINDS
from tests.e2e.chaos import Chaos, Outcomes, ask_until, undisturbed
from tests.e2e.cluster import Cluster
from tests.ports import free_port

CHAOS_S = float(os.environ.get("CHAOS_S", "180"))
SEED = int(os.environ.get("CHAOS_SEED", "3"))
NUM_CLIENTS = 6
NUM_TOKENS = 120
TOKEN = "chaos"


@pytest.fixture(scope="module")
def chaotic(
    tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Cluster, Admin]]:
    folder = tmp_path_factory.mktemp("chaos")
    token_file, port = folder / "token", free_port()
    token_file.write_text(TOKEN)
    cluster = Cluster(folder, tiny_llama, dtype="float32", num_blocks=400, max_model_len=1600)
    try:
        for index, role in enumerate(("prefill", "decode", "prefill", "decode")):
            cluster.worker(role, cores=index % 2)
        cluster.router(
            admin_port=port, admin_token_file=token_file, inactivity_s=2.5, status_timeout_s=2.0
        )
        cluster.wait_ready()
        with Admin(f"http://127.0.0.1:{port}", TOKEN) as admin:
            yield cluster, admin
    finally:
        cluster.close()


@pytest.mark.long
@pytest.mark.timeout(CHAOS_S + 180)
async def test_no_stream_breaks(chaotic: tuple[Cluster, Admin]) -> None:
    (cluster, admin), outcomes = chaotic, Outcomes()
    router = cluster.routers[0]
    chaos = Chaos(cluster, admin, random.Random(SEED), joins=True)
    async with httpx.AsyncClient(base_url=router.url, timeout=120) as client:
        expected = await undisturbed(client, NUM_TOKENS)
        assert all(answer.status == 200 for answer in expected.values())
        end = time.monotonic() + CHAOS_S
        happening = asyncio.create_task(chaos.until(end, (1.0, 4.0)))
        await asyncio.gather(
            *(
                ask_until(end, random.Random(i), client, expected, NUM_TOKENS, outcomes)
                for i in range(NUM_CLIENTS)
            )
        )
        await happening
    metrics = router.metrics()
    migrated = sum(
        value
        for (name, labels), value in metrics.items()
        if name == "baton_retries_total" and ("leg", "decode") in labels
    )
    print(
        f"{dict(chaos.happened)}; answered {sum(outcomes.answered.values())}, refused "
        f"{dict(outcomes.refused)}, wrong {len(outcomes.wrong)}; {migrated:.0f} decode legs went "
        f"elsewhere; the slowest answer took {outcomes.slowest_s:.1f} s"
    )
    assert not outcomes.wrong, "\n".join(outcomes.wrong[:5])
    assert set(outcomes.answered) == set(KINDS)
    assert migrated > 0
    assert metrics.value("baton_requests_in_flight") == 0
    await asyncio.to_thread(cluster.assert_all_back)
