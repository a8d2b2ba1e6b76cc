"""Prefill legs without a decode worker: what they say, refuse and give back."""

import asyncio
import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from engine.errors import InvalidRequest
from engine.request import Leg, RequestId
from engine.request_message import engine_request
from kvfabric.errors import HandshakeRefused, PeerLost
from prefill_server.service import _ticket
from protos import serving_pb2 as pb
from tests.relay import Worker, eventually, run_prefill, started_worker

PROMPT = random.Random(2).choices(range(17, 49152), k=200)


@pytest.fixture
async def worker(tiny_llama: Path) -> AsyncIterator[Worker]:
    with started_worker(tiny_llama, token_budget=16) as worker:
        yield worker
        await worker.assert_all_back()


def ticket(worker: Worker, **changes: object) -> pb.KVTicket:
    """Of a worker that is not there."""
    fields: dict[str, object] = {
        "transfer_id": bytes(16),
        "address": "inproc://nobody",
        "generation": 1,
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
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await worker.assert_all_back()
    assert worker.engine.stats().prompt_tokens_computed < len(PROMPT)


MALFORMED = [
    {"transfer_id": b"short"},
    {"num_tokens": 1},
    {"first_token": len(PROMPT)},
    {"block_size": 0},
]


@pytest.mark.parametrize("change", MALFORMED, ids=str)
async def test_malformed_tickets_are_refused(worker: Worker, change: dict[str, object]) -> None:
    request = pb.PrefillRequest(prompt_token_ids=PROMPT, ticket=ticket(worker, **change))
    with pytest.raises(InvalidRequest):
        _ticket(request)


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
