"""What workers scored when one of them was picked, for whoever has the request explained.

At the pick it is only noted what each was like; scores are reckoned when somebody asks, which is
seldom, and never on a request's way.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from router.leg_record import UNJUDGED, Judgement
from router.placement import Placement
from router.policy import Verdict, by_cost, judge_decodes, judge_prefills
from router.progress import Progress
from router.workers import PrefillWorker, Worker, WorkerSet


class _Seen(NamedTuple):
    """A policy `Candidate` as it was."""

    name: str
    address: str
    is_ready: bool
    fingerprint: bytes
    load: int
    num_picks: int


def judgement_of_pair(
    progress: Progress,
    decodes: Sequence[Worker],
    prefills: Sequence[Worker],
    taken: Worker,
) -> Judgement:
    """Of the decode workers, each with its best partner among `prefills`."""
    if not progress.record.is_kept:
        return UNJUDGED
    seen, partners, placement = _seen(decodes), _seen(prefills), progress.placement
    why = dict.fromkeys(progress.failed_decodes, "failed_this_prompt")

    def judge() -> Sequence[Verdict]:
        verdicts = judge_decodes(seen, partners, _at(taken.address, seen), _excluded(why))
        return _by_cost(verdicts, placement, seen)

    return Judgement(len(seen), judge)


def judgement_of_leg(
    progress: Progress,
    workers: WorkerSet,
    taken: PrefillWorker,
    fingerprint: bytes | None = None,
) -> Judgement:
    """Of the prefill workers."""
    if not progress.record.is_kept:
        return UNJUDGED
    prefills = workers.prefills
    seen, placement = _seen(prefills), progress.placement
    full = [one.address for one in prefills if not progress.full_queues.has_room(one)]
    why = dict.fromkeys(full, "queue_full")
    why |= dict.fromkeys(progress.failed_prefills, "failed_this_prompt")

    def judge() -> Sequence[Verdict]:
        at = _at(taken.address, seen)
        verdicts = judge_prefills(seen, at, fingerprint, _excluded(why))
        return _by_cost(verdicts, placement, seen)

    return Judgement(len(seen), judge)


def _seen(workers: Iterable[Worker]) -> list[_Seen]:
    return [
        _Seen(one.name, one.address, one.is_ready, one.fingerprint, one.load, one.num_picks)
        for one in workers
    ]


def _at(address: str, seen: Sequence[_Seen]) -> _Seen | None:
    return next((one for one in seen if one.address == address), None)


def _excluded(why: Mapping[str, str]) -> Callable[[_Seen], str]:
    return lambda worker: why.get(worker.address, "")


def _by_cost(
    verdicts: Sequence[Verdict], placement: Placement | None, seen: Sequence[_Seen]
) -> Sequence[Verdict]:
    """With what was predicted of them, if anything was."""
    if placement is None:
        return verdicts
    address_of = {worker.name: worker.address for worker in seen}
    return by_cost(verdicts, lambda name: placement.cost_ms(address_of[name]))
