"""What bench/router.py measures with: pretended workers, and a client that hears what they say."""

from contextlib import ExitStack
from pathlib import Path

import grpc
import pytest

from bench.router import Case, Seeds, System, run
from bench.router_client import RequestFailed, complete
from bench.router_processes import Fakes, spawn_fakes
from protos import serving_pb2 as pb
from protos import serving_pb2_grpc as pb_grpc

WORDS = {"relay": 7, "runner": 8}


async def generate(fakes: Fakes, seed: int, count: int) -> list[int]:
    """The tokens that the gRPC worker sends."""
    token_ids: list[int] = []
    async with grpc.aio.insecure_channel(f"127.0.0.1:{fakes.ports[0]}") as channel:
        stub: pb_grpc.DecodeAsyncStub = pb_grpc.DecodeStub(channel)
        sampling = pb.Sampling(max_tokens=count, seed=seed)
        async for event in stub.Generate(pb.GenerateRequest(sampling=sampling)):
            token_ids += event.tokens.token_ids
    return token_ids


async def test_what_is_sent_is_told_and_heard(tmp_path: Path) -> None:
    with ExitStack() as stack:
        http = spawn_fakes(stack, "http", 1, WORDS, tmp_path)
        heard = await complete(http.ports[0], "fake", "Hi", seed=5, max_tokens=6, pace=200)
        told = http.told()[5]
        assert len(told.sent) == 6
        assert len(heard.events) == 6 + 2  # why it ended, and that it has
        assert heard.sent <= told.came
        assert all(a <= b for a, b in zip(told.sent, heard.events, strict=False))
        assert told.sent[-1] - told.sent[0] > 15e6, "sent at once, not at their pace"
        figures = await run(
            System("no router", tuple(http.ports), None, http), Case("c", 2, 5, 0), Seeds()
        )
        assert figures["added_ms"] > 0
        assert figures["tokens_s"] > 0
        grpc_fakes = spawn_fakes(stack, "grpc", 1, WORDS, tmp_path)
        assert await generate(grpc_fakes, 9, 3) == [7, 8, 7]
        assert len(grpc_fakes.told()[9].sent) == 3
        with pytest.raises(RequestFailed):
            await complete(grpc_fakes.ports[0], "fake", "Hi", seed=6, max_tokens=1, pace=0)
