"""Which cores, or which GPU, each worker gets. Pure, but for two looks at the machine.

A CPU worker is fastest alone on its cores: its engine computes, and the threads beside it move
KV, undisturbed. So workers get disjoint cores while there are enough, else they share; the router
floats, and the kernel finds it a place.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import TypeVar

_T = TypeVar("_T")


class BadCores(ValueError):
    """`--cores` is not understood, or names cores that this process may not use."""


class BadGpus(ValueError):
    """There are not as many GPUs as one worker needs."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the workers go: one entry each, in order."""

    cores: tuple[tuple[int, ...], ...]
    """Empty for a worker that is not pinned."""
    gpus: tuple[str, ...]
    """For CUDA_VISIBLE_DEVICES, one for each rank; empty when the workers run on the CPU."""
    summary: str
    """For people."""


def place(
    names: Sequence[str], ranks: Sequence[int], cores: Sequence[int], gpus: Sequence[str]
) -> Placement:
    """Spreads workers, of so many ranks each, over `gpus` if there are any, else over `cores`; no
    cores: not pinned. Each rank has a GPU, or its share of cores. Raises BadGpus for a worker of
    more ranks than GPUs."""
    ends = list(accumulate(ranks))
    if gpus:
        return _on_gpus(names, ranks, ends, gpus)
    if not cores:
        return Placement(((),) * len(names), (), "workers are not pinned to cores")
    share = len(cores) // ends[-1]
    if share == 0:
        sharing = tuple(_in_turn(cores, end - n, n) for end, n in zip(ends, ranks, strict=True))
        text = f"{_rank_count(ranks)} share {_count(len(cores), 'core')}: expect them to slow"
        return Placement(sharing, (), f"{text} each other")
    disjoint = tuple(
        tuple(cores[(end - n) * share : end * share]) for end, n in zip(ends, ranks, strict=True)
    )
    what = "worker" if max(ranks) == 1 else "rank of a worker"
    return Placement(disjoint, (), f"each {what} has {_count(share, 'core')} of its own")


def _on_gpus(
    names: Sequence[str], ranks: Sequence[int], ends: Sequence[int], gpus: Sequence[str]
) -> Placement:
    if max(ranks) > len(gpus):
        raise BadGpus(f"a worker of {max(ranks)} ranks needs as many GPUs; there are {len(gpus)}")
    mine = tuple(",".join(_in_turn(gpus, end - n, n)) for end, n in zip(ends, ranks, strict=True))
    text = ", ".join(f"{name} on GPU {gpu}" for name, gpu in zip(names, mine, strict=True))
    return Placement(((),) * len(names), mine, text)


def _in_turn(what: Sequence[_T], first: int, count: int) -> tuple[_T, ...]:
    """So many from there on, around the end, each once at the most."""
    return tuple(what[(first + i) % len(what)] for i in range(min(count, len(what))))


def _rank_count(ranks: Sequence[int]) -> str:
    if max(ranks) == 1:
        return f"{len(ranks)} workers"
    return f"{sum(ranks)} ranks of {_count(len(ranks), 'worker')}"


def usable_cores(choice: str) -> tuple[int, ...]:
    """`auto`: all that this process may use; `none`; or a list such as `0-3,8`. Raises BadCores."""
    allowed = sorted(os.sched_getaffinity(0))
    if choice == "auto":
        return tuple(allowed)
    if choice == "none":
        return ()
    cores = parse_cores(choice)
    if missing := sorted(set(cores) - set(allowed)):
        raise BadCores(f"--cores {choice}: this process may not use {missing}, only {allowed}")
    return cores


def parse_cores(text: str) -> tuple[int, ...]:
    """Core numbers out of `0-3,8`, in order, each once. Raises BadCores."""
    cores: dict[int, None] = {}
    for part in text.split(","):
        first, _, last = part.partition("-")
        try:
            found = range(int(first), int(last or first) + 1)
        except ValueError:
            raise BadCores(f"--cores {text}: say auto, none, or a list such as 0-3,8") from None
        if not found:
            raise BadCores(f"--cores {text}: {part} is empty")
        cores |= dict.fromkeys(found)
    return tuple(cores)


def visible_gpus(device: str, environ: Mapping[str, str]) -> tuple[str, ...]:
    """The GPUs that workers on `device` may use, by what the driver and the environment show."""
    if device == "cpu":
        return ()
    if "CUDA_VISIBLE_DEVICES" in environ:
        return tuple(gpu for gpu in environ["CUDA_VISIBLE_DEVICES"].split(",") if gpu)
    numbers = (path.name.removeprefix("nvidia") for path in Path("/dev").glob("nvidia[0-9]*"))
    return tuple(sorted(numbers, key=int))


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")
