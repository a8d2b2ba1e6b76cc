"""The workers as an operator sees them: processes with names, addresses and roles.

A process is one member, whichever of its two services the router speaks to (router/workers.py has
one `Worker` for each of them).
"""

from collections.abc import Sequence
from typing import Literal

import grpc
from pydantic import BaseModel

from protos import serving_pb2 as pb
from router.errors import LegFailed
from router.worker import Worker
from router.workers import WorkerSet

Role = Literal["prefill", "decode"]

_ROLES: dict[Role, pb.Role.ValueType] = {"prefill": pb.ROLE_PREFILL, "decode": pb.ROLE_DECODE}
_WORDS = {role: word for word, role in _ROLES.items()}


class NoSuchWorker(Exception):
    def __init__(self, worker: str) -> None:
        super().__init__(f"No worker has the name or the address {worker!r}.")


class Member(BaseModel):
    """A worker process."""

    name: str
    """Its own; its address until it has told."""
    address: str
    serves: list[Role]
    """Says it last; empty: it drains, or was never heard of."""
    ready: dict[Role, bool]
    """By what the router knows: takes calls now."""
    problem: dict[Role, str]
    """Why not, where it does not."""
    num_running: int
    """Requests there, of all routers: running, waiting, and awaiting KV."""
    num_leaving: int | None = None
    """Calls that were to end elsewhere, as an assignment has just answered."""


class Fleet:
    """See the module."""

    def __init__(self, workers: WorkerSet) -> None:
        self._workers = workers

    def members(self) -> list[Member]:
        addresses = dict.fromkeys(worker.address for worker in self._workers.everyone)
        return [_member(self._at(address)) for address in addresses]

    def member(self, worker: str) -> Member:
        """By name or address. Raises NoSuchWorker."""
        return _member(self._find(worker))

    def add(self, address: str) -> None:
        """It joins, in whatever roles it says that it serves."""
        if not self._at(address):
            self._workers.add(address, pb.ROLE_DECODE)

    def remove(self, worker: str) -> None:
        """Raises NoSuchWorker."""
        self._workers.remove(self._find(worker)[0].address)

    async def assign(self, worker: str, roles: Sequence[Role], grace_s: float) -> Member:
        """Raises NoSuchWorker, LegFailed."""
        found = self._find(worker)
        try:
            num_leaving = await found[0].assign([_ROLES[role] for role in roles], grace_s)
        except grpc.aio.AioRpcError as error:
            reason = error.code().name.lower()
            raise LegFailed(found[0].name, reason, error.details() or "") from error
        member = _member(found)
        # What it will say of itself in a moment.
        return member.model_copy(update={"serves": sorted({*roles}), "num_leaving": num_leaving})

    def _at(self, address: str) -> list[Worker]:
        return [worker for worker in self._workers.everyone if worker.address == address]

    def _find(self, worker: str) -> list[Worker]:
        found = self._at(worker)
        if not found:
            named = (one.address for one in self._workers.everyone if one.name == worker)
            found = self._at(next(named, ""))
        if not found:
            raise NoSuchWorker(worker)
        return found


def _member(services: Sequence[Worker]) -> Member:
    latest = max(services, key=lambda one: one.status.monotonic_ns)
    status = latest.status
    on_duty = [one for one in services if one.is_on_duty]
    return Member(
        name=latest.name,
        address=latest.address,
        serves=sorted(_WORDS[role] for role in status.serves),
        ready={_WORDS[one.role]: one.is_ready for one in on_duty},
        problem={_WORDS[one.role]: one.problem for one in on_duty if not one.is_ready},
        num_running=status.num_running + status.num_waiting + status.num_awaiting_kv,
    )
