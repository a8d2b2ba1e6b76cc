"""The gRPC face of a prefill worker: checks a request and runs one `PrefillLeg` for it.

Knows the control plane, the engine and the sending end of the fabric; no HTTP, no text.
"""

import itertools
from collections.abc import Awaitable, Callable, Iterable

import grpc
from prometheus_client import CollectorRegistry

from engine.async_engine import AsyncEngine
from engine.errors import InvalidRequest, QueueFull
from engine.kv_codec import Codec
from engine.request import Leg, RequestId
from engine.request_message import engine_request
from kvfabric.fabric import Fabric
from kvfabric.ticket import KVShard, Ticket, TransferId
from prefill_server.leg import PrefillLeg
from prefill_server.metrics import PrefillMetrics
from protos import serving_pb2 as pb
from protos import serving_pb2_grpc as pb_grpc
from runtime import log
from runtime.call import RETRY_AFTER_MS, deadline
from runtime.duty import Duty
from runtime.metrics import HandoffStages

Context = grpc.aio.ServicerContext[pb.PrefillRequest, pb.PrefillEvent]


_CODECS = frozenset(map(int, Codec))
"""That we know; a newer receiver may know more."""


Watch = Callable[
    [pb.Role.ValueType, pb.WatchRequest, Callable[[pb.WorkerState], Awaitable[None]]],
    Awaitable[None],
]
"""Writes states until the call ends."""


class PrefillService(pb_grpc.PrefillServicer):
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
        self._metrics = PrefillMetrics(registry, stages)
        self._serial = itertools.count()

    # Written, not yielded: a cancelled `write` raises here and unwinds the leg at once, while a
    # generator suspended at `yield` would hold its blocks until it is collected.
    async def Prefill(  # type: ignore[override]
        self, request: pb.PrefillRequest, context: Context
    ) -> None:
        async with self._duty.call("prefill"):
            await self._prefill(request, context)

    async def _prefill(self, request: pb.PrefillRequest, context: Context) -> None:
        # A retry may come while the call it replaces is still unwinding: ids here are our own.
        request_id = RequestId(f"{request.request_id}/prefill-{next(self._serial)}")
        vocab_size = self._engine.engine.model_config.vocab_size
        leg = PrefillLeg(
            self._engine,
            self._fabric,
            self._metrics,
            engine_request(request, Leg.PREFILL, request_id, vocab_size),
            _ticket(request, self._engine.engine.kv_shape[1]),
        )
        told = {"prompt_tokens": len(request.prompt_token_ids)}
        with log.leg("prefill", request.request_id, **told):
            async with deadline(request.remaining_ms):
                try:
                    await leg.run(context.write)
                except QueueFull as full:
                    retry_ms = max(1, round(full.retry_after_s * 1000))
                    context.set_trailing_metadata(((RETRY_AFTER_MS, str(retry_ms)),))
                    raise

    async def Status(
        self,
        request: pb.StatusRequest,
        context: object,
    ) -> pb.WorkerStatus:
        return self._status(pb.ROLE_PREFILL)

    async def Watch(  # type: ignore[override]
        self,
        request: pb.WatchRequest,
        context: grpc.aio.ServicerContext[pb.WatchRequest, pb.WorkerState],
    ) -> None:
        await self._watch(pb.ROLE_PREFILL, request, context.write)

    async def Ledger(self, request: pb.LedgerRequest, context: object) -> pb.WorkerLedger:
        return await self._ledger(pb.ROLE_PREFILL)


def _ticket(request: pb.PrefillRequest, num_heads: int) -> Ticket | None:
    """Raises InvalidRequest. `num_heads` are the KV heads that the shards must add up to."""
    if not request.HasField("ticket"):
        return None
    ticket = request.ticket
    num_tokens = len(request.prompt_token_ids)
    if len(ticket.transfer_id) != 16 or ticket.block_size == 0:
        raise InvalidRequest("the ticket is malformed")
    if ticket.num_tokens != num_tokens or ticket.first_token >= num_tokens:
        raise InvalidRequest(
            f"the ticket is for tokens [{ticket.first_token}, {ticket.num_tokens}) "
            f"of a prompt of {num_tokens}"
        )
    if not _tile(ticket.shards, num_heads):
        raise InvalidRequest(f"the ticket's shards are not the {num_heads} KV heads of the model")
    return Ticket(
        transfer_id=TransferId(ticket.transfer_id),
        shards=tuple(
            KVShard(shard.address, shard.generation, shard.first_head, shard.num_heads)
            for shard in ticket.shards
        ),
        fingerprint=ticket.fingerprint,
        facts=ticket.facts,
        first_token=ticket.first_token,
        num_tokens=ticket.num_tokens,
        block_size=ticket.block_size,
        codecs=tuple(codec for codec in ticket.codecs if codec in _CODECS),
    )


def _tile(shards: Iterable[pb.KVShard], num_heads: int) -> bool:
    """Whether they follow upon each other, from the first head to the last."""
    end = 0
    for shard in shards:
        if shard.first_head != end or not shard.num_heads:
            return False
        end += shard.num_heads
    return end == num_heads


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
    service = PrefillService(engine, fabric, status, watch, ledger, registry, stages, duty)
    pb_grpc.add_PrefillServicer_to_server(service, server)
    return [pb.DESCRIPTOR.services_by_name["Prefill"].full_name]
