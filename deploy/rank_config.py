"""The configuration of a process that is one of a worker's other ranks."""

from dataclasses import dataclass

from deploy.worker_config import WorkerConfig
from runtime.flags import flag


@dataclass(frozen=True, kw_only=True)
class RankConfig(WorkerConfig):
    """Flags of `python -m deploy.rank`: those of its worker, and what ties it to it. The worker
    sets all of them."""

    rank: int = flag(help="which rank this is, from 1 on")
    steps_fd: int = flag(help="inherited socket: the engine's channel to rank 0")
    handoff_fd: int = flag(help="inherited socket: the fabric's channel to rank 0")
    rendezvous: str = flag(help="file through which the ranks meet")
