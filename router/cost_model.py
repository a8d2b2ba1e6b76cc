"""What things take on each worker and link, fitted to what they took. Pure: no IO, no clock.

A worker's steps are a linear model over what they compute, with DistServe's and Niyama's features
(arXiv 2401.09670, 2503.22562):

    seconds = w · (steps, decodes, decode context, prefill tokens, prefill attention)

so that a prefill, a decode step, and what a chunk adds to the streams beside it are read off one
fit. It begins with the weights that the worker pushes, and learns from the work and seconds between
two of its states. A worker that has not computed a prompt yet is taken to do so as others of its
kind do, or as the prior says. A link's fit is a line over bytes; a way's corrects what is
predicted of a whole TTFT by what came of it: calls, reservations and whatever else nobody models.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

from router.online_fit import OnlineFit

NUM_FEATURES = 5
_FIRST_OF_PREFILL = 3
TILE_TOKENS = 16
"""Chunks beside streams are so many tokens, or a multiple."""

LINK_PRIOR = (2e-3, 1e-9)
"""Seconds, and seconds a byte: 1 GB/s, where the decode worker has not measured its own."""
WAY_PRIOR = (2e-3, 1.0)
"""Seconds, and seconds for each that was predicted."""


@dataclass(frozen=True, slots=True)
class Streams:
    """Those that run on a worker."""

    num: int = 0
    context: int = 0
    """Tokens that they attend to in a step."""


NO_STREAMS = Streams()


@dataclass(frozen=True, slots=True)
class Pace:
    """How much of a prompt a worker computes in a step."""

    token_budget: int = 1 << 30
    step_slo_s: float = inf
    """Steps with streams end by then, as far as it can tell."""

    def chunk(self, step_s: float, token_s: float) -> int:
        """Tokens beside streams that alone make a step of `step_s`; a tile at least."""
        left_s = self.step_slo_s - step_s
        if token_s <= 0 or left_s >= token_s * self.token_budget:
            return self.token_budget
        return min(self.token_budget, max(1, int(left_s / token_s / TILE_TOKENS)) * TILE_TOKENS)


AS_IT_LIKES = Pace()


class PrefillTime(NamedTuple):
    """Seconds."""

    total: float
    felt: float
    """By each stream beside it: what its steps took longer than without the prompt."""


class WorkerCost:
    """Of one worker process."""

    def __init__(self) -> None:
        self.fit = OnlineFit(NUM_FEATURES)
        self.knows_prefill = False
        """By its own word, or by what it was seen to compute."""
        self._told: tuple[Sequence[int], float] | None = None

    def told(
        self,
        weights: Sequence[float],
        work: Sequence[int],
        seconds: float,
        *,
        knows_prefill: bool = False,
    ) -> None:
        """A state of the worker: its own fit, and sums over all steps so far. `knows_prefill`: its
        fit has seen prompts, which may be those of the probe at its start."""
        if len(weights) == NUM_FEATURES and any(weights):
            self.fit.set_prior(weights)
            self.knows_prefill |= knows_prefill
        if len(work) != NUM_FEATURES:
            return
        if self._told is not None and seconds > self._told[1]:
            before, before_s = self._told
            new = [now - then for now, then in zip(work, before, strict=True)]
            if min(new) >= 0:  # else the sums began anew: another process
                self.fit.learn(new, seconds - before_s)
        self._told = (tuple(work), seconds)
        self.knows_prefill |= work[_FIRST_OF_PREFILL] > 0

    def step_s(self, streams: Streams) -> float:
        """A decode step of so many streams."""
        return self.fit.predict((1, streams.num, streams.context, 0, 0))


@dataclass
class CostModel:
    """See the module. Workers are named by their addresses."""

    workers: dict[str, WorkerCost] = field(default_factory=dict)
    links: dict[tuple[str, str], OnlineFit] = field(default_factory=dict)
    ways: dict[tuple[str, str], OnlineFit] = field(default_factory=dict)
    """Of (prefill worker or nothing, decode worker)."""
    _link_priors: dict[str, tuple[float, float]] = field(default_factory=dict)
    kind_of: Callable[[str], bytes] = lambda address: b""
    """Workers of one kind compute alike, as far as is not known better."""

    def worker(self, address: str) -> WorkerCost:
        if (found := self.workers.get(address)) is None:
            found = self.workers[address] = WorkerCost()
        return found

    def link(self, prefill: str, decode: str) -> OnlineFit:
        prior = self._link_priors.get(decode, LINK_PRIOR)
        return _fit(self.links, (prefill, decode), prior)

    def told_link(self, decode: str, nbytes_per_s: float) -> None:
        """What the worker's own test of its fabric has found: links to it begin with that."""
        if nbytes_per_s <= 0:
            return
        prior = self._link_priors[decode] = (LINK_PRIOR[0], 1 / nbytes_per_s)
        for (_, to), link in self.links.items():
            if to == decode:
                link.set_prior(prior)

    def way(self, prefill: str, decode: str) -> OnlineFit:
        return _fit(self.ways, (prefill, decode), WAY_PRIOR)

    def prefill_s(
        self,
        address: str,
        num_tokens: int,
        num_cached: int,
        pace: Pace,
        beside: Streams = NO_STREAMS,
    ) -> PrefillTime | None:
        """Of [num_cached, num_tokens) of a prompt, chunk by chunk, with the streams beside it in
        each step; None while nobody of its kind has computed any."""
        weights = self._prefill_weights(address)
        if weights is None:
            return None
        num = max(1, num_tokens - num_cached)
        attention = num * num_cached + num * (num + 1) / 2
        own_s = weights[3] * num + weights[4] * attention
        step_s = weights[0] + weights[1] * beside.num + weights[2] * beside.context
        chunk = pace.chunk(step_s, own_s / num) if beside.num else pace.token_budget
        steps = -(-num // max(1, chunk))
        return PrefillTime(own_s + steps * step_s, own_s)

    def _prefill_weights(self, address: str) -> Sequence[float] | None:
        own = self.worker(address)
        if own.knows_prefill:
            return own.fit.weights
        kind = self.kind_of(address)
        others = sorted(
            other.fit.weights[_FIRST_OF_PREFILL:]
            for name, other in self.workers.items()
            if other.knows_prefill and self.kind_of(name) == kind
        )
        if not others:
            return None
        borrowed = others[len(others) // 2]
        return [*own.fit.weights[:_FIRST_OF_PREFILL], *borrowed]


def _fit(
    fits: dict[tuple[str, str], OnlineFit], key: tuple[str, str], prior: tuple[float, float]
) -> OnlineFit:
    if (found := fits.get(key)) is None:
        found = fits[key] = OnlineFit(2, prior)
    return found
