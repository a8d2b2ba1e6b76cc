"""What a worker says of itself when asked (`Status` of both services)."""

import secrets
import time

from engine.engine import Engine
from engine.prefill_order import AGEING
from kvfabric.fabric import Fabric
from protos import serving_pb2 as pb
from runtime.duty import Duty

ROLES: dict[str, pb.Role.ValueType] = {"prefill": pb.ROLE_PREFILL, "decode": pb.ROLE_DECODE}


class WorkerStatus:
    """Facts that stand, and a snapshot of those that move."""

    def __init__(
        self, name: str, model: str, engine: Engine, fabric: Fabric, generation: int, duty: Duty
    ) -> None:
        self._duty = duty
        self._engine = engine
        self._fabric = fabric
        self._facts = pb.WorkerStatus(
            name=name,
            generation=generation,
            fingerprint=engine.fingerprint,
            model=model,
            max_model_len=engine.max_model_len,
            block_size=engine.block_size,
            num_blocks=engine.num_blocks,
            max_queue_ms=round(engine.config.max_queue_ms or 0),
            token_budget=engine.config.token_budget,
            max_num_seqs=engine.config.max_num_seqs,
            kv_token_nbytes=engine.kv_token_nbytes,
            queue_ageing=AGEING if engine.config.prefill_policy == "srf" else 0.0,
            step_slo_ms=round(engine.config.tpot_slo_ms or 0),
        )

    def shipped(self, nbytes_per_s: float) -> None:
        """The fabric's self-test has found this."""
        self._facts.fabric_bytes_per_s = round(nbytes_per_s)

    @property
    def generation(self) -> int:
        return self._facts.generation

    def __call__(self, role: pb.Role.ValueType) -> pb.WorkerStatus:
        engine, fabric = self._engine.stats(), self._fabric.stats()
        status = pb.WorkerStatus(
            role=role,
            monotonic_ns=time.monotonic_ns(),
            draining=not self._duty.roles,
            serves=[ROLES[role] for role in sorted(self._duty.roles)],
            num_waiting=engine.waiting,
            num_running=engine.running,
            num_awaiting_kv=engine.awaiting_kv,
            queue_ms=round(engine.queue_seconds * 1000),
            blocks=pb.BlockLedger(
                free=engine.blocks.free,
                cached=engine.blocks.cached,
                held=engine.blocks.held,
                in_flight=engine.blocks.in_flight,
                promised=engine.blocks.promised,
                pinned=engine.blocks.pinned,
            ),
            fabric=pb.FabricLedger(
                send_slots_used=fabric.send_slots_used,
                recv_slots_used=fabric.recv_slots_used,
                transfers=fabric.expected_transfers + fabric.outgoing_transfers,
                endpoints=fabric.endpoints,
            ),
        )
        status.MergeFrom(self._facts)
        return status


def new_generation() -> int:
    """64 random bits that tell this process from any before it on the same port."""
    return secrets.randbits(64)
