"""What ranks that compute one model together say to each other inside a step.

Every rank of a group calls the same, in the same order, with shapes that match. On the CPU the
ranks speak by gloo, over the loopback interface only, and sum in the order of their numbers: the
sum is the same bit for bit on each, and a row's does not depend on the rows beside it. On CUDA they
speak by NCCL, which is as quick as the link, and sums as it likes.

The group is torch's, but none of torch's global state is used: a process may be in several groups.
"""

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor

from engine.tp.shard import Shard

JOIN_TIMEOUT_S = 300.0
"""Until all ranks have loaded their weights and have met."""
STEP_TIMEOUT_S = 60.0
"""For one collective: from the first rank that comes to it to the last."""


class Collectives(Protocol):
    """See the module."""

    def sum(self, part: Tensor) -> Tensor:
        """Over all ranks, the same on each. `part` may be overwritten."""
        ...

    def gather_columns(self, part: Tensor, num_columns: int) -> Tensor:
        """[n, this rank's cut of num_columns] → [n, num_columns] on rank 0; elsewhere `part`."""
        ...


class Alone:
    """A rank that has no others."""

    def sum(self, part: Tensor) -> Tensor:
        return part

    def gather_columns(self, part: Tensor, num_columns: int) -> Tensor:
        return part


class _Backend(Protocol):
    """What torch's backends have in common; its stubs leave it out."""

    def allreduce(self, tensors: list[Tensor]) -> dist.Work: ...
    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor]) -> dist.Work: ...
    def gather(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], options: dist.GatherOptions
    ) -> dist.Work: ...
    def abort(self) -> None: ...


_Make = Callable[[object, int, int, object], _Backend]
"""(store, rank, size, options): what torch's stubs do not know of gloo's."""


class TorchCollectives:
    """A group of processes on one host (or threads, on the CPU). `join` first.

    A rank that is lost fails the others' next collective with RuntimeError, on the CPU at once; on
    CUDA somebody has to notice and `abort`.
    """

    def __init__(self, shard: Shard, device: torch.device, rendezvous: Path) -> None:
        """`rendezvous`: a file, not there yet, in a folder that only the ranks can write."""
        self._shard = shard
        self._device = device
        self._rendezvous = rendezvous
        self._backend: _Backend | None = None

    def join(self) -> None:
        """Blocks until all ranks have joined. Raises RuntimeError if one does not in time."""
        shard = self._shard
        store = dist.FileStore(str(self._rendezvous), shard.size)  # type: ignore[attr-defined]
        store.set_timeout(timedelta(seconds=JOIN_TIMEOUT_S))
        # A backend connects within a step's time; until all are here it may take longer.
        store.set(f"rank {shard.rank} is here", "")
        store.wait([f"rank {rank} is here" for rank in range(shard.size)])
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
            make, options = cast(_Make, dist.ProcessGroupNCCL), _nccl_options()
        else:
            make, options = cast(_Make, dist.ProcessGroupGloo), _gloo_options()
        self._backend = make(store, shard.rank, shard.size, options)
        self.sum(torch.zeros(1, device=self._device))  # NCCL connects at the first use

    def sum(self, part: Tensor) -> Tensor:
        # The backend gets no local name: a traceback would keep it, and others waiting for us.
        if self._device.type == "cuda":
            self._joined().allreduce([part]).wait()
            return part
        parts = [torch.empty_like(part) for _ in range(self._shard.size)]
        self._joined().allgather([parts], [part.contiguous()]).wait()
        total, *others = parts
        for other in others:
            total += other
        return total

    def gather_columns(self, part: Tensor, num_columns: int) -> Tensor:
        rank, size = self._shard.rank, self._shard.size
        if not len(part):
            return part.new_empty(0, num_columns) if rank == 0 else part
        widths = [len(Shard(other, size).cut(num_columns)) for other in range(size)]
        even = part.new_empty(len(part), widths[0])  # gathered parts have one shape
        even[:, : widths[rank]] = part
        parts = [torch.empty_like(even) for _ in range(size)] if rank == 0 else []
        options = dist.GatherOptions()
        options.rootRank = 0
        self._joined().gather([parts] if parts else [], [even], options).wait()
        if rank != 0:
            return part
        return torch.cat([p[:, :width] for p, width in zip(parts, widths, strict=True)], dim=1)

    def abort(self) -> None:
        """Any thread: collectives under way end, with an error or with nonsense; none may follow.
        On the CPU they notice a lost rank by themselves, and this does nothing."""
        if self._backend is not None and self._device.type == "cuda":
            self._backend.abort()

    def close(self) -> None:
        """No collective follows; the other ranks notice."""
        self._backend = None

    def _joined(self) -> _Backend:
        assert self._backend is not None, "join first"
        return self._backend


def _nccl_options() -> object:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=STEP_TIMEOUT_S)
    return options


def _gloo_options() -> object:
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._timeout = timedelta(seconds=STEP_TIMEOUT_S)
    return options
