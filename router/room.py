"""Whether workers have room for one more prompt, or it is better off in the router. Pure.

Workers shall always have enough to do, and no long lines of their own: what waits there cannot be
put in a fair order any more. So a decode worker takes as many sequences as it computes at a time
and `FEW` more, unless a few wait there already; a prefill worker takes prompts while there are few,
or little work, before them. What was let through and is on its way to some worker counts too.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

FEW = 8


@dataclass(frozen=True, slots=True)
class Spot:
    """A worker as the next prompt would find it."""

    num_there: int
    """Sequences, whatever they do."""
    num_queued: int
    """Of those, prompts that are not computed yet, as far as is known."""
    ahead_s: float
    """What is to be computed before it."""
    max_num_seqs: int = 0
    """That it computes at a time; 0: it does not say."""


@dataclass(frozen=True, slots=True)
class OnTheWay:
    """Let through, but no worker has them yet."""

    num_prompts: int = 0
    num_samples: int = 0
    seconds: float = 0.0
    """That their prompts will take, if that can be said."""


def has_room(
    decodes: Sequence[Spot], prefills: Sequence[Spot], on_the_way: OnTheWay, ahead_s: float
) -> bool:
    """`prefills`: none if decode workers compute prompts. True without any decode worker: what to
    do then is dispatch's to say. `ahead_s`: little work."""
    if not decodes:
        return True
    if sum(map(_slots, decodes)) <= on_the_way.num_samples:
        return False
    computing = prefills or decodes
    each_s = on_the_way.seconds / len(computing)
    places = sum(_places(spot, ahead_s - each_s) for spot in computing)
    if places > on_the_way.num_prompts:
        return True
    # An idle decode worker computes the prompt itself where that is cheaper than to wait.
    return any(not spot.num_there for spot in decodes) and not on_the_way.num_prompts


def _slots(decode: Spot) -> float:
    if decode.num_queued >= FEW:
        return 0
    if not decode.max_num_seqs:
        return math.inf
    return max(0, decode.max_num_seqs + FEW - decode.num_there)


def _places(spot: Spot, ahead_s: float) -> float:
    return math.inf if spot.ahead_s < ahead_s else max(0, FEW - spot.num_queued)
