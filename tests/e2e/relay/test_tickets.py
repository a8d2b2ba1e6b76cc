"""Tickets by hand, on the control plane: a ticket is good for one transfer, to one process, of one
model.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest

from protos import serving_pb2 as pb
from protos import serving_pb2_grpc as pb_grpc
from tests.e2e.cluster import Cluster, WorkerProcess
from tests.e2e.slow_relay import of_role, prompt_of, undisturbed


def sampling(max_tokens: int) -> pb.Sampling:
    return pb.Sampling(max_tokens=max_tokens, top_p=1, repetition_penalty=1, ignore_eos=True)


@asynccontextmanager
async def reserved_stream(
    cluster: Cluster, prompt: list[int]
) -> AsyncIterator[
    tuple[pb.KVTicket, "grpc.aio.UnaryStreamCall[pb.GenerateRequest, pb.GenerateEvent]"]
]:
    """A Generate stream by hand, up to its ticket."""
    decode = of_role(cluster, "decode")[0]
    async with grpc.aio.insecure_channel(decode.grpc_address) as channel:
        request = pb.GenerateRequest(
            request_id="by-hand",
            prompt_token_ids=prompt,
            sampling=sampling(5),
            samples=[pb.Sample()],
        )
        call = pb_grpc.DecodeStub(channel).Generate(request, timeout=30)
        async for event in call:
            if event.HasField("reserved"):
                yield event.reserved, call
                break
        call.cancel()


async def prefill_by_hand(
    worker: WorkerProcess, prompt: list[int], ticket: pb.KVTicket
) -> list[pb.PrefillEvent]:
    async with grpc.aio.insecure_channel(worker.grpc_address) as channel:
        request = pb.PrefillRequest(
            request_id="by-hand",
            prompt_token_ids=prompt,
            sampling=sampling(5),
            samples=[pb.Sample()],
            ticket=ticket,
        )
        return [event async for event in pb_grpc.PrefillStub(channel).Prefill(request, timeout=30)]


async def test_ticket_used_twice(cluster: Cluster) -> None:
    """By two workers at once and again afterwards: one transfer, one answer, the others aborted."""
    prompt = prompt_of(8)
    prefills = of_role(cluster, "prefill")
    async with reserved_stream(cluster, prompt) as (ticket, call):
        outcomes = await asyncio.gather(
            *(prefill_by_hand(worker, prompt, ticket) for worker in prefills),
            return_exceptions=True,
        )
        refused = [o for o in outcomes if isinstance(o, grpc.aio.AioRpcError)]
        assert [error.code() for error in refused] == [grpc.StatusCode.ABORTED]
        for worker in prefills:
            with pytest.raises(grpc.aio.AioRpcError, match="ABORTED"):
                await prefill_by_hand(worker, prompt, ticket)
        tokens: list[int] = []
        async for event in call:
            assert not event.HasField("reserved"), "the first transfer was not disturbed"
            tokens += event.tokens.token_ids
    assert tokens == await undisturbed(cluster, prompt, 5)


@pytest.mark.parametrize(
    ("field", "value"), [("fingerprint", bytes(32)), ("generation", 1)], ids=["model", "process"]
)
async def test_ticket_of_another_model_or_process(
    cluster: Cluster, field: str, value: object
) -> None:
    """Refused before any byte of KV: the model by the sender, the process in the handshake. The
    prefill leg says so."""
    prompt = prompt_of(9, 50)
    async with reserved_stream(cluster, prompt) as (ticket, _):
        setattr(ticket if field == "fingerprint" else ticket.shards[0], field, value)
        with pytest.raises(grpc.aio.AioRpcError, match="FAILED_PRECONDITION"):
            await prefill_by_hand(of_role(cluster, "prefill")[0], prompt, ticket)
