"""Workers without a model for bench/router.py, each a process: `python -m bench.router_fakes KIND`.

`grpc` is a decode worker of Baton's, `http` a server with OpenAI's completions. A request's `top_k`
is the pace of its tokens, in tokens a second (0: as fast as they are taken), `max_tokens` says how
many, `seed` names it. Streams of one pace get their tokens at the same moment, as in a step. When
an answer ends, a line of JSON goes into the log: the seed, when the request came, and when each
token was handed to the network, in nanoseconds of the clock that all processes share.
"""

import argparse
import asyncio
import json
import math
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, TextIO

import grpc
from aiohttp import web

from protos import serving_pb2 as pb
from protos import serving_pb2_grpc as pb_grpc

MAX_MODEL_LEN = 4096
_NUM_BLOCKS = 1 << 16
_STATE_S = 0.25


class Sent:
    """When what was sent, and what is to be sent when."""

    def __init__(self, log: TextIO, phase: float, words: dict[str, int]) -> None:
        """`phase` is the part of a step, [0, 1), by which this worker's come later."""
        self._log = log
        self._phase = phase
        self.words = list(words.items())

    async def tokens(self, seed: int, count: int, pace: int) -> AsyncIterator[int]:
        """Indices of tokens, each when it is due: to be sent at once."""
        came, sent = time.monotonic_ns(), []
        for index in range(count):
            if pace:
                await asyncio.sleep(self._until_step(pace))
            sent.append(time.monotonic_ns())
            yield index
        print(json.dumps({"seed": seed, "came": came, "sent": sent}), file=self._log, flush=True)

    def _until_step(self, pace: int) -> float:
        now = time.monotonic() * pace - self._phase
        return (math.floor(now) + 1 - now) / pace


class Decode(pb_grpc.DecodeServicer):
    def __init__(self, sent: Sent, name: str) -> None:
        self._sent = sent
        self._status = pb.WorkerStatus(
            name=name,
            role=pb.ROLE_DECODE,
            generation=1,
            fingerprint=b"fake",
            max_model_len=MAX_MODEL_LEN,
            block_size=16,
            num_blocks=_NUM_BLOCKS,
            blocks=pb.BlockLedger(free=_NUM_BLOCKS),
            max_num_seqs=256,
            token_budget=512,
            step_slo_ms=90,
            queue_ageing=0.1,
            kv_token_nbytes=23_040,
        )
        # Seconds for a step, a decode, context, prefill tokens, attention: placed by as any others.
        self._steps = pb.StepTimes(weights=(5e-3, 1e-3, 1e-6, 5e-4, 1e-8), knows_prefill=True)

    async def Generate(  # type: ignore[override]
        self,
        request: pb.GenerateRequest,
        context: grpc.aio.ServicerContext[pb.GenerateRequest, pb.GenerateEvent],
    ) -> None:
        sampling, words = request.sampling, self._sent.words
        tokens = self._sent.tokens(sampling.seed, sampling.max_tokens, sampling.top_k)
        async for index in tokens:
            token_ids = [words[index % len(words)][1]]
            told = pb.Tokens(first_index=index, token_ids=token_ids)
            await context.write(pb.GenerateEvent(tokens=told))
        await context.write(pb.GenerateEvent(finished=pb.Finished(reason=pb.FINISH_REASON_LENGTH)))

    async def Status(self, request: pb.StatusRequest, context: object) -> pb.WorkerStatus:
        self._status.monotonic_ns = time.monotonic_ns()
        return self._status

    async def Watch(  # type: ignore[override]
        self,
        request: pb.WatchRequest,
        context: grpc.aio.ServicerContext[pb.WatchRequest, pb.WorkerState],
    ) -> None:
        while True:
            self._status.monotonic_ns = time.monotonic_ns()
            await context.write(pb.WorkerState(status=self._status, steps=self._steps))
            await asyncio.sleep(_STATE_S)

    async def Renew(self, request: pb.RenewRequest, context: object) -> pb.RenewReply:
        return pb.RenewReply()

    async def Finish(self, request: pb.FinishRequest, context: object) -> pb.FinishReply:
        return pb.FinishReply()

    async def Ledger(self, request: pb.LedgerRequest, context: object) -> pb.WorkerLedger:
        return pb.WorkerLedger(name=self._status.name, role=pb.ROLE_DECODE, generation=1)


class Backend:
    """OpenAI's face, as far as routers ask for it."""

    def __init__(self, sent: Sent, model: str) -> None:
        self._sent = sent
        self._model = model
        self.app = web.Application()
        self.app.router.add_post("/v1/completions", self._complete)
        self.app.router.add_get("/v1/models", self._models)
        self.app.router.add_get("/{rest:.*}", self._fine)

    async def _fine(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "ok", "model_path": self._model})

    async def _models(self, request: web.Request) -> web.Response:
        model = {"id": self._model, "object": "model", "created": 0, "owned_by": "fake"}
        return web.json_response({"object": "list", "data": [model]})

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        count, words = body["max_tokens"], self._sent.words
        async for index in self._sent.tokens(body["seed"], count, max(0, body["top_k"])):
            await response.write(self._event(f" {words[index % len(words)][0]}", None))
        await response.write(self._event("", "length") + b"data: [DONE]\n\n")
        return response

    def _event(self, text: str, reason: str | None) -> bytes:
        choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": reason}
        chunk: dict[str, Any] = {"id": f"cmpl-{'0' * 32}", "object": "text_completion"}
        chunk |= {"created": 1700000000, "model": self._model, "choices": [choice]}
        return f"data: {json.dumps(chunk, separators=(',', ':'))}\n\n".encode()


async def serve_grpc(sent: Sent, name: str) -> None:
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    pb_grpc.add_DecodeServicer_to_server(Decode(sent, name), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(port, flush=True)
    await server.wait_for_termination()


async def serve_http(sent: Sent, model: str) -> None:
    runner = web.AppRunner(Backend(sent, model).app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    print(runner.addresses[0][1], flush=True)
    await asyncio.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.router_fakes", description=__doc__)
    parser.add_argument("kind", choices=["grpc", "http"])
    parser.add_argument("--name", default="fake")
    parser.add_argument("--log", type=Path, required=True)
    parser.add_argument("--phase", type=float, default=0.0)
    parser.add_argument("--words", type=json.loads, required=True, help="to their token ids, JSON")
    args = parser.parse_args()
    with args.log.open("w") as log:
        sent = Sent(log, args.phase, args.words)
        asyncio.run((serve_grpc if args.kind == "grpc" else serve_http)(sent, args.name))


if __name__ == "__main__":
    main()
