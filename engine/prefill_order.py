"""Whose tokens are computed first, of those that have more than one to compute or wait to come in.

Pure. `fcfs`: who came first. `srf`: shortest remaining first, ageing by what has come since:

    key = tokens left to compute + AGEING * tokens of all that have come, its own included

The smaller key goes first; a long prompt under way is passed between two chunks. Waiting is bounded
by construction. Let x have r tokens left, and let y, which came later, go before it. Then

    left(y) + AGEING * arrived(y) < left(x) + AGEING * arrived(x),

and arrived(y) - arrived(x) is at least the tokens of all those that came after x, up to y and with
it. So all that ever pass x have together fewer than r / AGEING tokens, however many they are and
whenever they come: x waits for what was there before it, for that much, and for nothing else.

What was preempted has streams waiting for its next token: it goes before all that is new, by age.
What waits for KV from elsewhere has nothing to compute here.
"""

from typing import Literal

from engine.sequence import Sequence

PrefillPolicy = Literal["fcfs", "srf"]

AGEING = 0.5

_Key = tuple[float, int]


class PrefillOrder:
    """See the module."""

    def __init__(self, policy: PrefillPolicy) -> None:
        self._is_srf = policy == "srf"
        self._num_tokens_arrived = 0

    def enter(self, seq: Sequence, num_hit_tokens: int) -> None:
        """It comes to the engine; so many of its tokens are expected from the prefix cache."""
        seq.num_expected_hits = num_hit_tokens
        self._num_tokens_arrived += num_left(seq)
        seq.num_tokens_arrived = self._num_tokens_arrived

    def key(self, seq: Sequence) -> _Key:
        """Does not change while it waits."""
        if not self._is_srf:
            return 0.0, seq.arrival
        if seq.was_preempted:
            return -1.0, seq.arrival
        return num_left(seq) + AGEING * seq.num_tokens_arrived, seq.arrival


def num_left(seq: Sequence) -> int:
    """Tokens that it has to compute, as far as is known."""
    if seq.awaits_transfer:
        return 0
    if seq.num_computed_tokens:
        return seq.num_uncomputed_tokens
    return seq.num_uncomputed_tokens - seq.num_expected_hits
