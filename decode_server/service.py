"""The gRPC face of a decode worker: checks a request and runs one `DecodeLeg` for it.

Knows the control plane, the engine and the receiving end of the fabric; no HTTP, no text.
"""

import itertools
from collections.abc import Awaitable, Callable

import grpc
from prometheus_client import CollectorRegistry

from decode_server.leg import DecodeLeg
from decode_server.metrics import DecodeMetrics
from decode_server.tail import TailPolicy
from engine.async_engine import AsyncEngine
from engine.request import Leg, RequestId
from engine.request_message import engine_request
from kvfabric.fabric import Fabric
from protos import serving_pb2 as pb
from protos import serving_pb2_grpc as pb_grpc
from runtime import log
from runtime.call import deadline
from runtime.duty import Duty
from runtime.metrics import HandoffStages

Context = grpc.aio.ServicerContext[pb.GenerateRequest, pb.GenerateEvent]


Watch = Callable[
    [pb.Role.ValueType, pb.WatchRequest, Callable[[pb.WorkerState], Awaitable[None]]],
    Awaitable[None],
]
"""Writes states until the call ends."""


class DecodeService(pb_grpc.DecodeServicer):
    """See protos/serving.proto."""

    def __init__(
        self,
        engine: AsyncEngine,
        fabric: Fabric,
        status: Callable[[pb.Role.ValueType], pb.WorkerStatus],
        watch: Watch,
        ledger: Callable[[pb.Role.ValueType], Awaitable[pb.WorkerLedger]],
        registry: CollectorRegistry,
        stages: HandoffStages,
        duty: Duty,
    ) -> None:
        self._engine = engine
        self._fabric = fabric
        self._status = status
        self._watch = watch
        self._ledger = ledger
        self._duty = duty
        self._metrics = DecodeMetrics(registry, stages)
        self._tails = TailPolicy(engine.engine.config.max_local_tail)
        self._legs: dict[DecodeLeg, str] = {}  # the router's name of each one's request
        self._serial = itertools.count()

    # Written, not yielded: a cancelled `write` raises here and unwinds the leg at once, while a
    # generator suspended at `yield` would hold its blocks until it is collected.
    async def Generate(  # type: ignore[override]
        self, request: pb.GenerateRequest, context: Context
    ) -> None:
        async with self._duty.call("decode"):
            await self._generate(request, context)

    async def _generate(self, request: pb.GenerateRequest, context: Context) -> None:
        # A retry may come while the call it replaces is still unwinding: ids here are our own.
        request_id = RequestId(f"{request.request_id}/decode-{next(self._serial)}")
        role = Leg.LOCAL if request.local_prefill else Leg.DECODE
        vocab_size = self._engine.engine.model_config.vocab_size
        leg = DecodeLeg(
            self._engine,
            self._fabric,
            self._metrics,
            self._tails,
            engine_request(request, role, request_id, vocab_size),
        )
        if request.local_prefill:
            self._metrics.count_local_prefill(request.local_prefill_reason)
        told = {"prompt_tokens": len(request.prompt_token_ids), "samples": len(request.samples)}
        self._legs[leg] = request.request_id
        try:
            with log.leg("decode", request.request_id, **told):
                async with deadline(request.remaining_ms):
                    await leg.run(context.write)
        finally:
            del self._legs[leg]

    async def Renew(self, request: pb.RenewRequest, context: object) -> pb.RenewReply:
        # The transfer id is the capability; the request's own id is for the log.
        for leg in self._legs:
            leg.renew(request.transfer_id, request.local_prefill_reason)
        return pb.RenewReply()

    async def Finish(self, request: pb.FinishRequest, context: object) -> pb.FinishReply:
        for leg, request_id in self._legs.items():
            if request_id == request.request_id:
                leg.finish(request.sample)
        return pb.FinishReply()

    async def Status(self, request: pb.StatusRequest, context: object) -> pb.WorkerStatus:
        return self._status(pb.ROLE_DECODE)

    async def Watch(  # type: ignore[override]
        self,
        request: pb.WatchRequest,
        context: grpc.aio.ServicerContext[pb.WatchRequest, pb.WorkerState],
    ) -> None:
        await self._watch(pb.ROLE_DECODE, request, context.write)

    async def Ledger(self, request: pb.LedgerRequest, context: object) -> pb.WorkerLedger:
        return await self._ledger(pb.ROLE_DECODE)


def add_services(
    server: grpc.aio.Server,
    engine: AsyncEngine,
    fabric: Fabric,
    status: Callable[[pb.Role.ValueType], pb.WorkerStatus],
    watch: Watch,
    ledger: Callable[[pb.Role.ValueType], Awaitable[pb.WorkerLedger]],
    registry: CollectorRegistry,
    stages: HandoffStages,
    duty: Duty,
) -> list[str]:
    """Mounts the service; returns the full names of what was mounted, for health."""
    service = DecodeService(engine, fabric, status, watch, ledger, registry, stages, duty)
    pb_grpc.add_DecodeServicer_to_server(service, server)
    return [pb.DESCRIPTOR.services_by_name["Decode"].full_name]
