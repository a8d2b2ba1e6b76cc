"""What a request wants of its times, and who says so. Pure.

Of each time alone: the request's own header, else what its key is given, else the router's flags.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from router.errors import BadRequest

TTFT_HEADER = "x-slo-ttft-ms"
TPOT_HEADER = "x-slo-tpot-ms"

_MILLISECONDS = re.compile(r"[0-9]{1,7}(\.[0-9]{1,6})?", re.ASCII)


@dataclass(frozen=True, slots=True)
class Objective:
    """Seconds; infinity: none."""

    ttft_s: float = math.inf
    tpot_s: float = math.inf

    def after(self, waited_s: float) -> "Objective":
        """What is left of it."""
        return Objective(max(1e-6, self.ttft_s - waited_s), self.tpot_s)

    @property
    def is_none(self) -> bool:
        return math.isinf(self.ttft_s) and math.isinf(self.tpot_s)


NO_OBJECTIVE = Objective()


@dataclass(frozen=True, slots=True)
class Wish:
    """What one of those who may say so says. Milliseconds; 0: explicitly none; None: nothing."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None

    def over(self, other: "Wish") -> "Wish":
        """This one, and of what it leaves open the other."""
        return Wish(
            other.ttft_ms if self.ttft_ms is None else self.ttft_ms,
            other.tpot_ms if self.tpot_ms is None else self.tpot_ms,
        )

    @property
    def objective(self) -> Objective:
        return Objective(
            self.ttft_ms / 1000 if self.ttft_ms else math.inf,
            self.tpot_ms / 1000 if self.tpot_ms else math.inf,
        )


NO_WISH = Wish()


def wish_of(ttft: Sequence[str], tpot: Sequence[str]) -> Wish:
    """Of the values of the two headers, each as often as it came. Raises BadRequest."""
    return Wish(_milliseconds(TTFT_HEADER, ttft), _milliseconds(TPOT_HEADER, tpot))


def _milliseconds(name: str, values: Sequence[str]) -> float | None:
    if not values:
        return None
    if len(values) > 1:
        raise BadRequest(f"The header {name!r} came {len(values)} times.", param=name)
    if not _MILLISECONDS.fullmatch(values[0].strip()):
        raise BadRequest(
            f"The header {name!r} must be milliseconds, a number from 0 (no objective) up to "
            "9999999, such as 250 or 12.5.",
            param=name,
        )
    return float(values[0])
