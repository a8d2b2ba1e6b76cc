"""One token out of a worker: whether it can do what it is for, beyond answering.

A prompt of one token, computed there and shipped to nobody. It finds nothing in a cache and leaves
nothing there.
"""

import secrets

import grpc

from protos import serving_pb2 as pb
from router.worker import DecodeWorker, PrefillWorker, Worker

REASON = "probe"
"""Of the local prefill."""


async def probe(worker: Worker, timeout_s: float) -> bool:
    """Whether the token came in time. A full queue is good enough: the worker is well."""
    request_id = f"probe-{secrets.token_hex(4)}"
    sampling = pb.Sampling(max_tokens=1, top_p=1, repetition_penalty=1)
    try:
        if isinstance(worker, DecodeWorker):
            generate = pb.GenerateRequest(
                request_id=request_id,
                prompt_token_ids=[0],
                sampling=sampling,
                samples=[pb.Sample()],
                local_prefill=True,
                local_prefill_reason=REASON,
            )
            decoding = worker.stub.Generate(generate, timeout=timeout_s)
            return any([event.HasField("tokens") async for event in decoding])
        assert isinstance(worker, PrefillWorker)
        prefill = pb.PrefillRequest(
            request_id=request_id,
            prompt_token_ids=[0],
            sampling=sampling,
            samples=[pb.Sample()],
        )
        prefilling = worker.stub.Prefill(prefill, timeout=timeout_s)
        return any([event.HasField("first_token") async for event in prefilling])
    except grpc.aio.AioRpcError as error:
        return error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
