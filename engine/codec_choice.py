"""Which codec a transfer uses: the one by which its KV is there soonest. Pure.

Time per raw byte is `encode + ratio / link + decode`, one after the other, as the last frame of a
transfer feels it. Only codecs that the ticket allows are considered: lossy ones are a matter of
policy on decode, not of speed.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

_WEIGHT = 0.1
"""Of the newest frame."""

RAW = 0
"""Codec id; needs no cost: nothing is encoded."""


@dataclass(frozen=True, slots=True)
class CodecCost:
    """Of one codec on this machine, per byte of raw payload."""

    ratio: float
    """Encoded bytes."""
    encode_s: float
    decode_s: float
    """As this machine would; the receiver is taken to be like it."""

    def seconds(self, link_nbytes_per_s: float) -> float:
        return self.encode_s + self.ratio / link_nbytes_per_s + self.decode_s

    def after(self, ratio: float, encode_s: float, weight: float) -> "CodecCost":
        """What another frame has shown counts by `weight`, what was known by the rest."""
        return CodecCost(
            self.ratio + weight * (ratio - self.ratio),
            self.encode_s + weight * (encode_s - self.encode_s),
            self.decode_s,
        )


def choose_codec(
    allowed: Iterable[int], link_nbytes_per_s: float | None, costs: Mapping[int, CodecCost]
) -> int:
    """An id out of `allowed`, which holds RAW at least in spirit: RAW is always allowed. A link
    that was not measured yet gets RAW, and is measured by it."""
    if link_nbytes_per_s is None:
        return RAW
    candidates = [codec for codec in allowed if codec in costs]
    best = min(candidates, key=lambda c: costs[c].seconds(link_nbytes_per_s), default=RAW)
    if best in costs and costs[best].seconds(link_nbytes_per_s) < 1 / link_nbytes_per_s:
        return best
    return RAW


class CodecPolicy:
    """What the codecs cost here, and the choice by it. Any thread: a cost is replaced whole."""

    def __init__(self, costs: Mapping[int, CodecCost]) -> None:
        self._costs = dict(costs)

    def choose(self, allowed: Iterable[int], link_nbytes_per_s: float | None) -> int:
        return choose_codec(allowed, link_nbytes_per_s, self._costs)

    def learn(self, codec: int, raw_nbytes: int, nbytes: int, seconds: float) -> None:
        """A frame was encoded; to `raw_nbytes`, if it gained nothing."""
        cost = self._costs[codec]
        self._costs[codec] = cost.after(nbytes / raw_nbytes, seconds / raw_nbytes, _WEIGHT)
