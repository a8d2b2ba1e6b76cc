"""A fake worker with both services and a duty, as real ones have them."""

from typing import Any

import grpc

from protos import serving_pb2 as pb
from protos import serving_pb2_grpc as pb_grpc
from tests.router.fake_relay import Relay
from tests.router.fake_workers import FakeCluster, FakeDecode, FakePrefill


class FakeBoth(FakeDecode, pb_grpc.DutyServicer, pb_grpc.CacheServicer):
    """The decode service, with `prefill` beside it."""

    def __init__(self, relay: Relay, name: str) -> None:
        super().__init__(relay, name)
        self.prefill = FakePrefill(relay, name)
        self.assignments: list[pb.AssignRequest] = []
        self.pins: dict[str, pb.PinRequest] = {}
        self.num_failing_pins = 0
        """Calls about pins that fail from now on."""

    def _add(self, server: grpc.aio.Server) -> None:
        super()._add(server)
        self.prefill._add(server)
        pb_grpc.add_DutyServicer_to_server(self, server)
        pb_grpc.add_CacheServicer_to_server(self, server)

    async def Assign(self, request: pb.AssignRequest, context: object) -> pb.AssignReply:
        self.assignments.append(request)
        self.serves(*request.roles)
        return pb.AssignReply(num_leaving=2)

    async def Pin(
        self,
        request: pb.PinRequest,
        context: "grpc.aio.ServicerContext[pb.PinRequest, pb.PinReply]",
    ) -> pb.PinReply:
        await self._fail_if_told(context)
        self.pins[request.name] = request
        return pb.PinReply(num_blocks=3, num_cached=2, num_pinned=1, max_pinned=7)

    async def Unpin(
        self,
        request: pb.UnpinRequest,
        context: "grpc.aio.ServicerContext[pb.UnpinRequest, pb.UnpinReply]",
    ) -> pb.UnpinReply:
        await self._fail_if_told(context)
        return pb.UnpinReply(was_there=self.pins.pop(request.name, None) is not None)

    async def _fail_if_told(self, context: "grpc.aio.ServicerContext[Any, Any]") -> None:
        if self.num_failing_pins:
            self.num_failing_pins -= 1
            await context.abort(grpc.StatusCode.UNAVAILABLE, "not just now")

    def serves(self, *roles: pb.Role.ValueType) -> None:
        for service in (self, self.prefill):
            service.status.serves[:] = roles
            service.status.draining = not roles


async def join(cluster: FakeCluster) -> FakeBoth:
    """One more worker of the cluster; the router is still to hear of it."""
    both = FakeBoth(cluster.relay, "both")
    both.serves(pb.ROLE_DECODE, pb.ROLE_PREFILL)
    await both.start()
    cluster.decodes.append(both)
    return both
