"""The worker's `Duty` service: roles are given and taken while it serves."""

import grpc

from deploy.worker_status import ROLES
from engine.errors import InvalidRequest
from protos import serving_pb2 as pb
from protos import serving_pb2_grpc as pb_grpc
from runtime.duty import Duty
from runtime.log import get_logger

log = get_logger()

_WORDS = {role: word for word, role in ROLES.items()}


class DutyService(pb_grpc.DutyServicer):
    """See protos/serving.proto."""

    def __init__(self, duty: Duty) -> None:
        self._duty = duty

    async def Assign(self, request: pb.AssignRequest, context: object) -> pb.AssignReply:
        unknown = [role for role in request.roles if role not in _WORDS]
        if unknown:
            raise InvalidRequest(f"roles {unknown} are none that a worker can serve")
        roles = [_WORDS[role] for role in request.roles]
        log.info("assigned", roles=",".join(roles) or "none", grace_s=request.grace_ms / 1000)
        self._duty.assign(roles, request.grace_ms / 1000)
        return pb.AssignReply(num_leaving=self._duty.num_leaving)


def add_services(server: grpc.aio.Server, duty: Duty) -> list[str]:
    """Mounts the service; returns its full name, for health."""
    pb_grpc.add_DutyServicer_to_server(DutyService(duty), server)
    return [pb.DESCRIPTOR.services_by_name["Duty"].full_name]
