"""How many streams a decode worker will have in a while. Pure.

Prefill delays what admission does to decode: who judges by the streams that run now lets everybody
in while those under way have not come yet, and then nobody (Mooncake, arXiv 2407.00079, section 7,
where every stream is taken to last alike). Here a stream ends at any moment with the same
likelihood: that needs no ages of streams, so that routers which share nothing forecast alike, and a
batch does not vanish at once.
"""

import math
from dataclasses import dataclass

from router.cost_model import Streams


@dataclass(frozen=True, slots=True)
class DecodeForecast:
    """Of one worker, as of now."""

    num_running: float
    num_joining: float
    """Whose prompts are being computed, or wait for that: they come before one that comes now."""
    context: float
    """Tokens that a stream attends to, on average."""
    life_s: float
    """How long a stream runs, on average."""

    def num_at(self, after_s: float) -> float:
        """Streams, when so much time has passed and those under way have come, evenly."""
        if self.life_s <= 0:
            return self.num_running + self.num_joining
        lives = max(0.0, after_s) / self.life_s
        left = math.exp(-lives)
        come = (1 - left) / lives if lives > 1e-9 else 1.0
        return self.num_running * left + self.num_joining * come

    def at(self, after_s: float) -> Streams:
        num = self.num_at(after_s)
        return Streams(round(num), round(num * self.context))
