"""Whether a request would miss its objective because of load, and when it would not. Pure.

Refused before a prefill is spent on it (Mooncake, arXiv 2407.00079, section 7). An objective that
idle workers would miss too is not judged: coming back later would not help.
"""

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

from router.objective import Objective

LONGEST_S = 60.0
"""What is told to wait at most: further on nobody can see."""


@dataclass(frozen=True, slots=True)
class Times:
    """Predicted of a request, seconds."""

    ttft_s: float
    tpot_s: float


class Miss(NamedTuple):
    reason: Literal["slo_ttft", "slo_tpot"]
    predicted_s: float
    retry_after_s: float


def judge(objective: Objective, loaded: Times, idle: Times, life_s: float) -> Miss | None:
    """`loaded`: as things are, its wait in the router included. `life_s`: how long a stream runs,
    on average."""
    if loaded.ttft_s > objective.ttft_s >= idle.ttft_s:
        # Queues are worked off a second each second.
        return Miss("slo_ttft", loaded.ttft_s, _bounded(loaded.ttft_s - objective.ttft_s))
    if loaded.tpot_s > objective.tpot_s >= idle.tpot_s:
        above, allowed = loaded.tpot_s - idle.tpot_s, objective.tpot_s - idle.tpot_s
        # Streams above the first make the difference, and end by an e-th part in each life.
        wait_s = life_s * math.log(above / allowed) if allowed > 0 else math.inf
        return Miss("slo_tpot", loaded.tpot_s, _bounded(wait_s))
    return None


def _bounded(seconds: float) -> float:
    return min(LONGEST_S, max(0.0, seconds))
