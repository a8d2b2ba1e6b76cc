"""Which workers a prompt goes to: filter, score, pick. Pure: no IO, no clock.

A pair must agree on what KV means (the fingerprint). Among the pairs that do, the least loaded
wins; of equals, the workers picked least often, so that an idle cluster is used in turn.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar


class Candidate(Protocol):
    """What is known of a worker when picking."""

    @property
    def name(self) -> str: ...
    @property
    def is_ready(self) -> bool: ...
    @property
    def fingerprint(self) -> bytes: ...
    @property
    def load(self) -> int: ...
    @property
    def num_picks(self) -> int: ...


D = TypeVar("D", bound=Candidate)
P = TypeVar("P", bound=Candidate)


@dataclass(frozen=True, slots=True)
class Pair(Generic[D, P]):
    decode: D
    prefill: P | None
    """None: there is no prefill worker for this decode worker."""


def pick_prefill(prefills: Iterable[P], fingerprint: bytes | None = None) -> P | None:
    """The least loaded ready worker; of that fingerprint, if one is given."""
    return min(
        (
            worker
            for worker in prefills
            if worker.is_ready and fingerprint in (None, worker.fingerprint)
        ),
        key=_score,
        default=None,
    )


def pick_pair(decodes: Iterable[D], prefills: Sequence[P]) -> Pair[D, P] | None:
    """The least loaded pair; a decode worker alone only if none has a partner; None if no
    decode worker is ready."""
    pairs = [
        Pair(decode, pick_prefill(prefills, decode.fingerprint))
        for decode in decodes
        if decode.is_ready
    ]
    return min(pairs, key=_pair_score, default=None)


def _score(worker: Candidate) -> tuple[int, int, str]:
    return (worker.load, worker.num_picks, worker.name)


def _pair_score(pair: Pair[D, P]) -> tuple[bool, int, tuple[int, int, str]]:
    load = pair.decode.load + (pair.prefill.load if pair.prefill is not None else 0)
    return (pair.prefill is None, load, _score(pair.decode))
