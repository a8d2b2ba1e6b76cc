"""Which workers a prompt goes to: filter, score, pick. Pure: no IO, no clock.

A pair must agree on what KV means (the fingerprint), and is of two workers: one that serves both
roles ships nothing to itself. Among the pairs that do, the least loaded
wins; of equals, the workers picked least often, so that an idle cluster is used in turn.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Generic, Protocol, TypeVar


class Candidate(Protocol):
    """What is known of a worker when picking."""

    @property
    def name(self) -> str: ...
    @property
    def address(self) -> str: ...
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


def pick_prefill(
    prefills: Iterable[P], fingerprint: bytes | None = None, not_at: str = ""
) -> P | None:
    """The least loaded ready worker; of that fingerprint, if one is given, and not at that
    address."""
    return min(
        (
            worker
            for worker in prefills
            if worker.is_ready
            and fingerprint in (None, worker.fingerprint)
            and (not not_at or worker.address != not_at)
        ),
        key=_score,
        default=None,
    )


def pick_pair(decodes: Iterable[D], prefills: Sequence[P]) -> Pair[D, P] | None:
    """The least loaded pair; a decode worker alone only if none has a partner; None if no
    decode worker is ready."""
    pairs = [
        Pair(decode, pick_prefill(prefills, decode.fingerprint, decode.address))
        for decode in decodes
        if decode.is_ready
    ]
    return min(pairs, key=_pair_score, default=None)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a candidate scored when one was picked. Lower scores win: first `load`, which is that
    of the pair where decode workers are judged, then `num_picks`, then the name."""

    worker: str
    load: int
    num_picks: int
    why: str
    """`taken`, or why not: `failed_this_prompt`, `queue_full`, `not_ready`, `other_fingerprint`,
    `no_partner`, `dearer`, `more_loaded`, `picked_more_often`, `later_name`."""
    cost_ms: float | None = None
    """What it was predicted to cost: that was compared first."""


def by_cost(verdicts: Sequence[Verdict], cost_ms: Callable[[str], float | None]) -> list[Verdict]:
    """The same, where they were compared by what they were predicted to cost, by worker's name."""
    compared = ("more_loaded", "picked_more_often", "later_name")
    best = next((cost_ms(one.worker) for one in verdicts if one.why == "taken"), None)
    judged = []
    for one in verdicts:
        cost = cost_ms(one.worker)
        is_dearer = cost is not None and best is not None and cost > best
        why = "dearer" if is_dearer and one.why in compared else one.why
        judged.append(replace(one, cost_ms=cost, why=why))
    return judged


Key = tuple[int, int, int, str]


def judge_prefills(
    prefills: Iterable[P],
    taken: P | None,
    fingerprint: bytes | None = None,
    excluded: Callable[[P], str] = lambda worker: "",
) -> list[Verdict]:
    """The taken one first, then the others by what they scored. `excluded` says why a worker was
    left out before any were compared; empty: it was not."""
    judged = []
    for worker in prefills:
        load, num_picks, name = _score(worker)
        why = excluded(worker) or _unfit(worker, fingerprint)
        judged.append((worker, (load, load, num_picks, name), why))
    return _verdicts(judged, taken)


def judge_decodes(
    decodes: Iterable[D],
    prefills: Sequence[P],
    taken: D | None,
    excluded: Callable[[D], str] = lambda worker: "",
) -> list[Verdict]:
    """As `judge_prefills`, each with its best partner among `prefills`."""
    partners: dict[tuple[bytes, str], P | None] = {}
    own = {worker.address for worker in prefills}
    judged = []
    has_partner = False
    for worker in decodes:
        kind = worker.fingerprint, worker.address if worker.address in own else ""
        if kind not in partners:
            partners[kind] = pick_prefill(prefills, *kind)
        is_alone, load, score = _pair_score(Pair(worker, partners[kind]))
        has_partner |= worker is taken and not is_alone
        why = excluded(worker) or _unfit(worker) or ("no_partner" if is_alone else "")
        judged.append((worker, (load, *score), why))
    if not has_partner:  # then nobody is worse for lacking one
        judged = [(one, key, "" if why == "no_partner" else why) for one, key, why in judged]
    return _verdicts(judged, taken)


def _unfit(worker: Candidate, fingerprint: bytes | None = None) -> str:
    if not worker.is_ready:
        return "not_ready"
    return "" if fingerprint in (None, worker.fingerprint) else "other_fingerprint"


def _verdicts(judged: Sequence[tuple[D, Key, str]], taken: D | None) -> list[Verdict]:
    """Of (worker, its key: lower wins, why it was left out)."""
    best = next((key for worker, key, _ in judged if worker is taken), None)
    ordered = sorted(judged, key=lambda one: (one[0] is not taken, one[2] != "", one[1]))
    return [
        Verdict(
            worker.name,
            key[0],
            worker.num_picks,
            "taken" if worker is taken else why or _why_worse(key, best),
        )
        for worker, key, why in ordered
    ]


def _why_worse(key: Key, best: Key | None) -> str:
    reasons = ("more_loaded", "more_loaded", "picked_more_often", "later_name")
    pairs = zip(reasons, key, best or key, strict=True)
    return next((reason for reason, own, other in pairs if own != other), "later_name")


def _score(worker: Candidate) -> tuple[int, int, str]:
    return (worker.load, worker.num_picks, worker.name)


def _pair_score(pair: Pair[D, P]) -> tuple[bool, int, tuple[int, int, str]]:
    load = pair.decode.load + (pair.prefill.load if pair.prefill is not None else 0)
    return (pair.prefill is None, load, _score(pair.decode))
