"""Several samples of one prompt, which is computed or received once.

Pure. The samples of a request are sequences; until the prompt's KV is whole one of them, the
leader, stands for all:

    leader   waiting ─▶ (awaiting KV ─▶) running ──the prompt is whole──▶ running
    others   forking ─────────────────────────────────────fork──▶ running, or ended

1. `sequences` makes them; the leader knows the others as its `forks`. It comes in with blocks of
   its own, and with a promise of those that each of the others will not share, so that forking
   cannot fail. Under pressure the leader gives way with the promise.
2. Where no sample has outputs yet, token 0 of all is drawn from the leader's logits, or comes with
   the KV. A prefill leg is done then: its samples never fork.
3. `Forks.fork`: each of the others shares the whole blocks of the prompt and has its own copy of
   the partly filled one. From now on each lives, gives way and ends by itself.

Whole blocks of a prompt are never written again, so only the tail is copied, and at once. Samples
that were delivered outputs elsewhere (a resume) compute them as tails, each its own. If the tails
of all are more than the pool holds, those for which there is no room come in later, by themselves.
"""

from collections.abc import Iterator

from engine.holdings import Holdings
from engine.queues import Queues
from engine.request import EngineRequest
from engine.scheduled_batch import BlockCopy
from engine.sequence import Sequence, Status


def sequences(
    request: EngineRequest,
    arrivals: Iterator[int],
    max_model_len: int,
    eos_token_ids: frozenset[int] = frozenset(),
    submitted_ns: int = 0,
) -> Sequence:
    """The leader of a request's samples, with the others."""
    leader, *others = (
        Sequence(sample, next(arrivals), max_model_len, eos_token_ids, submitted_ns)
        for sample in request.each()
    )
    is_fresh = not any(seq.request.output_token_ids for seq in (leader, *others))
    leader.forks, leader.draws_forks = others, is_fresh and bool(others)
    for seq in others:
        # One that is to be sampled from by itself needs a token to compute.
        reach = seq.num_prompt_tokens if is_fresh else seq.num_tokens - 1
        seq.num_forked_tokens = min(seq.num_prompt_tokens, reach)
        seq.status = Status.FORKING
    return leader


class Forks:
    """See the module."""

    def __init__(self, queues: Queues, holdings: Holdings, num_blocks: int) -> None:
        self._queues = queues
        self._holdings = holdings
        self._num_blocks = num_blocks
        self._copies: list[BlockCopy] = []

    def split_off(self, leader: Sequence) -> list[Sequence]:
        """Those for which the pool has no room beside the others, even when it is empty."""
        late: list[Sequence] = []
        while leader.forks and self._holdings.cost(leader, ()) > self._num_blocks:
            seq = leader.forks.pop()
            seq.awaits_transfer = False
            seq.was_preempted = True  # as if it had been here and given way
            late.append(seq)
        leader.draws_forks &= bool(leader.forks)
        return late

    def fork(self, leader: Sequence) -> list[Sequence]:
        """The leader's prompt is whole. Those that fork now; one that has ended holds nothing."""
        forks, leader.forks, leader.draws_forks = leader.forks, [], False
        for seq in forks:
            seq.awaits_transfer = False
            seq.first_scheduled_ns = leader.first_scheduled_ns
            if seq.finish_reason is not None:
                continue
            copy = self._holdings.fork(leader, seq)
            if copy is not None:
                self._copies.append(copy)
            self._queues.join(seq, Status.RUNNING)
        return forks

    def take_copies(self) -> list[BlockCopy]:
        """To be done now, in the order of the steps."""
        copies, self._copies = self._copies, []
        return copies
