"""A rank beside a worker's own: its part of the model and of the KV, and its end of the fabric.

Started by the worker (deploy/ranks.py) as `python -m deploy.rank`; it has no scheduler, no gRPC and
no metrics of its own, and takes no request.

1. Pin to the cores given, load this rank's part of the model, start what the handoff needs.
2. Do what rank 0's engine announces (engine/tp/rank.py), until it closes the channel or is gone.
   Signals that end the worker do not end its ranks: rank 0 drains first.
3. If anything fails, tell rank 0, and end: rank 0's engine fails with that reason.
"""

import faulthandler
import logging
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from deploy.leaf_configs import engine_config, fabric_config
from deploy.rank_config import RankConfig
from deploy.rank_handoff import rank_handoff
from deploy.ranks import pin
from deploy.worker_status import new_generation
from engine.fingerprint import facts, fingerprint
from engine.tp.channel import StepChannel
from engine.tp.rank import Rank, telling
from engine.tp.shard import Shard
from kvfabric.fabric import Fabric
from kvfabric.frame import WIRE_VERSION
from kvfabric.ticket import KVShape
from runtime import flags, log

logger = log.get_logger()


def main() -> None:
    config = flags.parse(
        RankConfig, prog="python -m deploy.rank", description="A rank of a worker, started by it."
    )
    faulthandler.register(signal.SIGUSR1)
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, signal.SIG_IGN)
    log.configure(config.name, format=config.log_format, level=config.log_level)
    status = 1
    try:
        run(config)
        status = 0
    except Exception:
        logger.exception("failed")
    finally:
        logging.shutdown()
        os._exit(status)  # as the worker does


def run(config: RankConfig) -> None:
    """Returns when rank 0 has closed the channel, or is gone."""
    steps = StepChannel(socket.socket(fileno=config.steps_fd))
    with telling(steps):
        pin(config)
        settings = engine_config(config, Shard(config.rank, config.tensor_parallel))
        rank = Rank(settings, steps, Path(config.rendezvous))
        try:
            with _handoff(config, rank):
                rank.serve()
        finally:
            rank.close()


@contextmanager
def _handoff(config: RankConfig, rank: Rank) -> Iterator[None]:
    """This rank's end of the fabric, for as long as it serves."""
    dtype = rank.config.resolve_dtype(rank.model_config)
    meaning = rank.model_config, rank.digest, dtype, WIRE_VERSION
    settings = fabric_config(
        config, fingerprint(*meaning), facts(*meaning), new_generation(), rank=config.rank
    )
    fabric = Fabric(settings, rank.copier.allocate_staging(settings.staging_nbytes))
    shape = KVShape(*rank.kv_shape).shared_with(rank.kv_heads)
    end = socket.socket(fileno=config.handoff_fd)
    # A rank without it is no use: rank 0's engine sees it end, and the worker is started again.
    with rank_handoff(fabric, rank.copier, shape, end, on_failure=partial(os._exit, 1)):
        yield


if __name__ == "__main__":
    main()
