"""The other ranks of an engine as threads of this process, each with its own part of the model, its
own pool and its own end of a gloo group. All but their start is as in processes."""

import dataclasses
import socket
import tempfile
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import torch

from engine.engine_config import EngineConfig
from engine.tp.channel import StepChannel
from engine.tp.rank import Rank, telling
from engine.tp.ranks import ALONE, ConnectedRanks, NoRanks
from engine.tp.shard import Shard

CPU = torch.device("cpu")
END_TIMEOUT_S = 10.0


@contextmanager
def other_ranks(config: EngineConfig) -> Iterator[ConnectedRanks | NoRanks]:
    """The others of `config.shard`, as rank 0 sees them; all of them end well after `close`."""
    size = config.shard.size
    if size == 1:
        yield ALONE
        return
    ends: list[Future[None]] = []
    with (
        tempfile.TemporaryDirectory() as folder,
        ThreadPoolExecutor(size - 1, thread_name_prefix="other-rank") as pool,
    ):
        rendezvous, channels = Path(folder) / "rendezvous", []
        for rank in range(1, size):
            ours, theirs = socket.socketpair()
            channels.append(StepChannel(ours))
            own = dataclasses.replace(config, shard=Shard(rank, size))
            ends.append(pool.submit(_serve, own, StepChannel(theirs), rendezvous))
        ranks = ConnectedRanks(channels, config.resolve_device(), rendezvous)
        try:
            yield ranks
        finally:
            ranks.close()
        for end in ends:
            end.result(END_TIMEOUT_S)


def _serve(config: EngineConfig, channel: StepChannel, rendezvous: Path) -> None:
    try:
        with telling(channel):
            rank = Rank(config, channel, rendezvous)
            try:
                rank.serve()
            finally:
                rank.close()
    finally:
        channel.close()
