"""The worker's `Cache` service: prefixes that shall stay, each for a time.

The pool has no clock: this service tells it when a pin's time is up.
"""

import asyncio
import time

import grpc

from engine.engine import Engine
from engine.errors import InvalidRequest
from protos import serving_pb2 as pb
from protos import serving_pb2_grpc as pb_grpc
from runtime.log import get_logger

log = get_logger()

ANSWER_S = 5.0
"""For the engine to take a pin; it does between two steps."""
MAX_NAME = 128
MAX_TTL_MS = 30 * 86_400_000


class CacheService(pb_grpc.CacheServicer):
    """See protos/serving.proto. Loop thread only."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def Pin(self, request: pb.PinRequest, context: object) -> pb.PinReply:
        _check(request, self._engine.max_model_len)
        ttl_s = request.ttl_ms / 1000
        until_s = time.monotonic() + ttl_s
        taken = self._engine.pin(request.name, request.token_ids, request.cache_salt, until_s)
        # Whether or not it answers in time. The engine hears of the end after the pin.
        asyncio.get_running_loop().call_later(ttl_s, self._expire, until_s)
        async with asyncio.timeout(ANSWER_S):
            outcome = await asyncio.wrap_future(taken)
        max_pinned = self._engine.max_pinned
        log.info("pinned", pin=request.name, ttl_s=ttl_s, **outcome._asdict())
        return pb.PinReply(**outcome._asdict(), max_pinned=max_pinned)

    async def Unpin(self, request: pb.UnpinRequest, context: object) -> pb.UnpinReply:
        async with asyncio.timeout(ANSWER_S):
            was_there = await asyncio.wrap_future(self._engine.unpin(request.name))
        log.info("unpinned", pin=request.name, was_there=was_there)
        return pb.UnpinReply(was_there=was_there)

    def _expire(self, until_s: float) -> None:
        self._engine.expire_pins(max(until_s, time.monotonic()))


def _check(request: pb.PinRequest, max_num_tokens: int) -> None:
    """Raises InvalidRequest."""
    if not 1 <= len(request.name) <= MAX_NAME:
        raise InvalidRequest(f"the name of a pin has 1 to {MAX_NAME} characters")
    if not 1 <= request.ttl_ms <= MAX_TTL_MS:
        raise InvalidRequest(f"ttl_ms is {request.ttl_ms}; it must be 1 to {MAX_TTL_MS}")
    if len(request.token_ids) > max_num_tokens:
        raise InvalidRequest(
            f"{len(request.token_ids)} tokens are more than a sequence may have here, "
            f"{max_num_tokens}"
        )


def add_services(server: grpc.aio.Server, engine: Engine) -> list[str]:
    """Mounts the service; returns its full name, for health."""
    pb_grpc.add_CacheServicer_to_server(CacheService(engine), server)
    return [pb.DESCRIPTOR.services_by_name["Cache"].full_name]
