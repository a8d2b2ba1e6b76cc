"""Prefill legs without a decode worker: what they say, refuse and give back."""

import asyncio
import random
from collections.abc import AsyncIterator
from pathlib import Path
from unittest.mock import AsyncMock, Mock

import pytest
from prometheus_client import CollectorRegistry

from deploy.worker_ledger import WorkerLedger
from engine.errors import InvalidRequest, QueueFull
from engine.request import Leg, RequestId
from engine.request_message import engine_request
from kvfabric.errors import HandshakeRefused, PeerLost
from prefill_server.service import PrefillService, _ticket
from protos import serving_pb2 as pb
from runtime.call import RETRY_AFTER_MS
from runtime.duty import Duty
from runtime.metrics import HandoffStages
from tests.relay import Worker, eventually, run_prefill, started_worker

PROMPT = random.Random(2).choices(range(17, 49152), k=200)


@pytest.fixture
async def worker(tiny_llama: Path) -> AsyncIterator[Worker]:
    with started_worker(tiny_llama, token_budget=16) as worker:
        yield worker
        await worker.assert_all_back()


def nobody(num_heads: int, first_head: int = 0) -> pb.KVShard:
    return pb.KVShard(
        address="inproc://nobody", generation=1, first_head=first_head, num_heads=num_heads
    )


def ticket(worker: Worker, **changes: object) -> pb.KVTicket:
    """Of a worker that is not there."""
    fields: dict[str, object] = {
        "transfer_id": bytes(16),
        "shards": [nobody(worker.engine.kv_shape[1])],
        "fingerprint": worker.engine.fingerprint,
        "num_tokens": len(PROMPT),
        "block_size": 16,
    }
    return pb.KVTicket(**{**fields, **changes})  # type: ignore[arg-type]


async def test_one_token_without_a_ticket(worker: Worker) -> None:
    events = await run_prefill(worker.prefill_leg(PROMPT, 1, None))
    first, shipped = events
    assert first.first_token.finish_reason == pb.FINISH_REASON_LENGTH
    assert shipped.shipped.timings.build_ns > 0
    assert shipped.shipped.timings.kv_nbytes == 0


async def test_nobody_at_the_ticket_s_address(worker: Worker) -> None:
    """Noticed at once: the prompt is not computed to its end for nobody."""
    with pytest.raises(PeerLost):
        await run_prefill(worker.prefill_leg(PROMPT, 5, ticket(worker)))
    await worker.assert_all_back()
    assert worker.engine.stats().prompt_tokens_computed < len(PROMPT)


async def test_ticket_for_another_model(worker: Worker) -> None:
    with pytest.raises(HandshakeRefused):
        await run_prefill(worker.prefill_leg(PROMPT, 5, ticket(worker, fingerprint=bytes(32))))


async def test_cancel_in_mid_prefill_stops_within_a_chunk(worker: Worker) -> None:
    task = asyncio.create_task(run_prefill(worker.prefill_leg(PROMPT, 1, None)))
    await eventually(lambda: worker.engine.stats().prompt_tokens_computed > 0)
    computed = worker.engine.stats().prompt_tokens_computed
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await worker.assert_all_back()
    # The chunk under way when the abort came, and one more that may have begun by then.
    assert worker.engine.stats().prompt_tokens_computed <= min(computed + 2 * 16, len(PROMPT) - 1)


MALFORMED = [
    {"transfer_id": b"short"},
    {"num_tokens": 1},
    {"first_token": len(PROMPT)},
    {"block_size": 0},
    {"shards": []},
    {"shards": [nobody(1)]},
    {"shards": [nobody(3)]},
    {"shards": [nobody(0), nobody(2)]},
    {"shards": [nobody(1), nobody(1)]},
    {"shards": [nobody(1, first_head=1), nobody(1)]},
]


def test_shards_that_are_the_heads_in_order_are_taken() -> None:
    shards = [nobody(1), nobody(1, first_head=1)]
    request = pb.PrefillRequest(
        prompt_token_ids=[1],
        ticket=pb.KVTicket(transfer_id=bytes(16), shards=shards, num_tokens=1, block_size=16),
    )
    ticket = _ticket(request, 2)
    assert ticket is not None
    assert [shard.heads for shard in ticket.shards] == [range(1), range(1, 2)]


@pytest.mark.parametrize("change", MALFORMED, ids=str)
async def test_malformed_tickets_are_refused(worker: Worker, change: dict[str, object]) -> None:
    request = pb.PrefillRequest(prompt_token_ids=PROMPT, ticket=ticket(worker, **change))
    with pytest.raises(InvalidRequest):
        _ticket(request, 2)


BAD_REQUESTS = [
    pb.PrefillRequest(
        sampling=pb.Sampling(max_tokens=1, top_p=1, repetition_penalty=1), samples=[pb.Sample()]
    ),
    pb.PrefillRequest(
        prompt_token_ids=[7],
        sampling=pb.Sampling(max_tokens=1, top_p=1, repetition_penalty=1),
        samples=[],
    ),
    pb.PrefillRequest(
        prompt_token_ids=[100],
        sampling=pb.Sampling(max_tokens=1, top_p=1, repetition_penalty=1),
        samples=[pb.Sample()],
    ),
    pb.PrefillRequest(
        prompt_token_ids=[7],
        sampling=pb.Sampling(max_tokens=2, top_p=1, repetition_penalty=1),
        samples=[pb.Sample(output_token_ids=[1, 2])],
    ),
    pb.PrefillRequest(
        prompt_token_ids=[7],
        sampling=pb.Sampling(max_tokens=2, top_p=1, repetition_penalty=1, temperature=float("nan")),
        samples=[pb.Sample()],
    ),
]


@pytest.mark.parametrize("request_", BAD_REQUESTS, ids=lambda _: "")
def test_bad_requests_are_refused(request_: pb.PrefillRequest) -> None:
    with pytest.raises(InvalidRequest):
        engine_request(request_, Leg.PREFILL, RequestId("r"), vocab_size=100)


async def test_a_full_queue_is_told_before_anything_is_begun(tiny_llama: Path) -> None:
    """Not even the connection: the ticket stays unused."""
    with started_worker(
        tiny_llama, token_budget=16, max_queue_ms=1.0, prefill_policy="fcfs"
    ) as worker:
        await run_prefill(worker.prefill_leg(PROMPT, 1, None))  # measured from now on
        busy = asyncio.create_task(run_prefill(worker.prefill_leg([7, *PROMPT] * 2, 1, None)))
        await eventually(lambda: worker.engine.stats().running > 0)
        service = PrefillService(
            worker.loop_side,
            worker.fabric,
            lambda role: pb.WorkerStatus(role=role),
            AsyncMock(),
            WorkerLedger("worker", worker.loop_side, worker.fabric, 1),
            CollectorRegistry(),
            HandoffStages(CollectorRegistry()),
            Duty("worker", ["prefill"]),
        )
        request = pb.PrefillRequest(
            prompt_token_ids=PROMPT,
            sampling=pb.Sampling(max_tokens=5, top_p=1, repetition_penalty=1),
            samples=[pb.Sample()],
            ticket=ticket(worker),
        )
        context = Mock()
        with pytest.raises(QueueFull, match="would wait"):
            await service.Prefill(request, context)
        context.write.assert_not_called()
        [((key, retry_ms),)] = context.set_trailing_metadata.call_args.args
        assert (key, int(retry_ms) > 0) == (RETRY_AFTER_MS, True)
        assert worker.fabric.stats().outgoing_transfers == 0
        await busy
        await worker.assert_all_back()
