"""How many streams a decode worker will have in a while. Pure.

Prefill delays what admission does to decode: who judges by the streams that run now lets everybody
in while those under way have not come yet, and then nobody (Mooncake, arXiv 2407.00079, section 7,
where every stream is taken to last alike). Here a stream ends at any moment with the same
likelihood: that needs no ages of streams, so that routers which share nothing forecast alike, and a
batch does not vanish at once.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from router.cost_model import Streams


@dataclass(frozen=True, slots=True)
class DecodeForecast:
    """Of one worker, as of now."""

    num_running: float
    life_s: float
    """How long a stream runs, on average."""
    joining: tuple[float, ...] = ()
    """When those come whose prompts are on their way, in seconds from now."""
    context: float = 0.0
    """Tokens that a stream attends to, on average."""

    def most_from(self, after_s: float) -> float:
        """Streams then, or later, when those have come that are on their way by now: whoever joins
        then will run beside them. A standard deviation is in it: ends are a matter of chance."""
        if not self.num_running and not self.joining:
            return 0.0
        return max(num for at_s, num in self._course(after_s) if at_s >= after_s)

    def from_then(self, after_s: float) -> Streams:
        num = self.most_from(after_s)
        return Streams(round(num), round(num * self.context))

    def _course(self, after_s: float) -> Iterator[tuple[float, float]]:
        """(when, streams) at each coming, and then."""
        now_s, num = 0.0, self.num_running
        squares = num  # of the likelihood that each is there
        comings = sorted([*((at_s, 1) for at_s in self.joining), (max(0.0, after_s), 0)])
        for at_s, coming in comings:
            at_s = max(at_s, 0.0)
            left = math.exp((now_s - at_s) / self.life_s) if self.life_s > 0 else 1.0
            now_s, num = at_s, num * left + coming
            squares = squares * left**2 + coming
            yield now_s, num + math.sqrt(max(0.0, num - squares))
