"""The processes of a worker's other ranks: started, and seen to their end. Linux only.

A worker with `--tensor-parallel N` is N processes on one host: itself, rank 0, and N - 1 children
(`deploy/rank.py`). Each child is tied to this one by two pairs of sockets, which it inherits, and
by the kernel, which kills it if this process ends. Nothing of this exists for N = 1.

    steps     what the engines say to each other (engine/tp/channel.py)
    handoff   what the ends of the fabric say to each other

1. `rank_processes(config)` starts them; meanwhile this process loads its own part.
2. `connect` gives rank 0's engine its channels; the engine joins them, and ends them.
3. Leaving the block waits until all have ended, and kills those that have not.
"""

import dataclasses
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch

from deploy import child
from deploy.rank_config import RankConfig
from deploy.worker_config import WorkerConfig
from engine.config import ModelConfig, ModelError
from engine.tp.channel import StepChannel
from engine.tp.ranks import ALONE, ConnectedRanks, NoRanks
from engine.tp.shard import Shard
from runtime import flags

RANK = "deploy.rank"
"""Module, started with `python -m`."""
_END_TIMEOUT_S = 1.0
"""For ranks whose channels are closed; then they are killed."""


@dataclasses.dataclass(frozen=True, slots=True)
class RankProcess:
    """One child. The sockets are this process's ends."""

    rank: int
    popen: "subprocess.Popen[bytes]"
    steps: socket.socket
    handoff: socket.socket


@dataclasses.dataclass(frozen=True, slots=True)
class RankProcesses:
    """Ranks 1, 2, … of a worker, in order."""

    shard: Shard
    """Of this process: rank 0."""
    others: tuple[RankProcess, ...]
    rendezvous: Path

    def connect(self, device: torch.device) -> ConnectedRanks | NoRanks:
        if not self.others:
            return ALONE
        channels = [StepChannel(other.steps) for other in self.others]
        return ConnectedRanks(channels, device, self.rendezvous)


@contextmanager
def rank_processes(config: WorkerConfig) -> Iterator[RankProcesses]:
    """For as long as the block lives. Raises ModelError for more ranks than KV heads."""
    if config.tensor_parallel < 1:
        raise ModelError(f"tensor_parallel is {config.tensor_parallel}; it must be at least 1")
    shard = Shard(0, config.tensor_parallel)
    if shard.size == 1:
        yield RankProcesses(shard, (), Path())
        return
    shard.part_of(ModelConfig.from_folder(Path(config.model_path)))
    others: list[RankProcess] = []
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="baton-ranks-"))
        rendezvous = Path(folder) / "rendezvous"
        stack.callback(_end, others)
        for rank in range(1, shard.size):
            others.append(_start(of_rank(config, rank), rank, rendezvous))
        yield RankProcesses(shard, tuple(others), rendezvous)


def of_rank(config: WorkerConfig, rank: int) -> WorkerConfig:
    """The same, with this rank's share of the cores; ranks share those of which there are too
    few."""
    cores, size = config.cores, config.tensor_parallel
    if size == 1 or not cores:
        return config
    own = Shard(rank, size).cut(len(cores))
    mine = cores[own.start : own.stop] or (cores[rank % len(cores)],)
    return dataclasses.replace(config, cores=mine)


def pin(config: WorkerConfig) -> None:
    """This process to the cores that it was given."""
    if config.cores:
        os.sched_setaffinity(0, {int(core) for core in config.cores})


def _start(config: WorkerConfig, rank: int, rendezvous: Path) -> RankProcess:
    steps, their_steps = socket.socketpair()
    handoff, their_handoff = socket.socketpair()
    with their_steps, their_handoff:  # so that a rank that ends is seen by its sockets
        fields = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
        child_config = RankConfig(
            **fields | {"name": f"{config.name}/rank-{rank}"},
            rank=rank,
            steps_fd=their_steps.fileno(),
            handoff_fd=their_handoff.fileno(),
            rendezvous=str(rendezvous),
        )
        command = child.command(sys.executable, "-m", RANK, *flags.to_argv(child_config))
        fds = (their_steps.fileno(), their_handoff.fileno())
        popen = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=fds)
    return RankProcess(rank, popen, steps, handoff)


def _end(processes: Sequence[RankProcess]) -> None:
    for process in processes:
        process.steps.close()
        process.handoff.close()
    deadline = time.monotonic() + _END_TIMEOUT_S
    for process in processes:
        try:
            process.popen.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.popen.kill()
            process.popen.wait()
