"""Where a prompt is computed: on which prefill worker, for which decode worker, or there. Pure.

For each pair and for each decode worker alone, `Quotes` predicts what the client would feel:

    TTFT = room on decode + queue + prefill of what is not cached, corrected by what came of it
    TPOT = a decode step at that batch and context + what is felt of the handoff, an output token

Among those that meet the objective the cheapest wins, else the one that misses by least. The cost
is delay: the request's own, and what it makes others wait for. Running streams wait while a prompt
is computed beside them; whoever comes later waits for what a worker has to do, as many as wait on
average (`crowd`). That second term is what makes cached KV worth more than its own saving.
Equal costs, to the millisecond: the less loaded, then the one picked less often, then by name.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from router.cost_model import AS_IT_LIKES, NO_STREAMS, CostModel, Pace, Streams
from router.decode_forecast import DecodeForecast
from router.objective import NO_OBJECTIVE, Objective

_TIE_S = 1e-3
_WEIGHT = 0.02
"""Of the newest, in means over requests."""


@dataclass(frozen=True, slots=True)
class Site:
    """A worker as a prompt finds it."""

    address: str
    queue_s: float
    """Of prompts that are to be computed before it."""
    num_cached: int
    """Tokens of the prompt that it has."""
    num_behind: int = 0
    """Prompts there that it would be computed before."""
    pace: Pace = AS_IT_LIKES
    streams: Streams = NO_STREAMS
    forecast: DecodeForecast | None = None
    """Of the streams when this prompt's first token has come; None: as now."""
    room_s: float = 0.0
    """Until there are blocks for it."""
    load: int = 0
    num_picks: int = 0
    name: str = ""
    num_fetchable: int = 0
    """Tokens of the prompt that it could have from another worker, its own included."""
    fetch_s: float = 0.0
    """What getting those would take."""


@dataclass(frozen=True, slots=True)
class Demand:
    """What a prompt asks for."""

    num_tokens: int
    num_outputs: float
    """Expected."""
    token_nbytes: int = 0
    """Of KV."""
    objective: Objective = NO_OBJECTIVE


class Quote(NamedTuple):
    """What is predicted of one way. Seconds."""

    prefill: str
    """Empty: decode alone."""
    decode: str
    ttft_s: float
    tpot_s: float
    prefill_s: float
    num_to_compute: int
    """Tokens."""
    transfer_s: float
    others_s: float
    """What others would wait, summed."""
    raw_ttft_s: float
    """Before it was corrected."""
    rank: tuple[float, float, int, int, str]
    """Lower wins: by how much the objective is missed, cost, load, picks, name."""
    is_fetched: bool = False
    """A prefix from another worker: quicker than computing it again (Mooncake's estimate)."""

    @property
    def cost_s(self) -> float:
        return self.ttft_s + self.transfer_s + self.others_s


class Quotes:
    """Of one prompt. `crowd`: see `Crowd`."""

    def __init__(self, costs: CostModel, demand: Demand, crowd: float = 0.0) -> None:
        self._costs = costs
        self._demand = demand
        self._crowd = crowd

    def remote(self, prefill: Site, decode: Site) -> Quote | None:
        """None: nothing is known yet."""
        demand, costs = self._demand, self._costs
        own = prefill.address, demand.num_tokens
        found = costs.prefill_s(*own, prefill.num_cached, prefill.pace)
        if found is None:
            return None
        alone, is_fetched = found.total, False
        if prefill.num_fetchable > prefill.num_cached:
            rest = costs.prefill_s(*own, prefill.num_fetchable, prefill.pace)
            if rest is not None and prefill.fetch_s + rest.total < alone:
                alone, is_fetched = prefill.fetch_s + rest.total, True
        nbytes = max(0, demand.num_tokens - decode.num_cached) * demand.token_nbytes
        transfer_s = costs.link(prefill.address, decode.address).predict((1, nbytes))
        raw_s = max(prefill.queue_s, decode.room_s) + alone
        load = prefill.load + decode.load
        others_s = (self._crowd + prefill.num_behind) * alone
        quote = self._quote(prefill, decode, raw_s, alone, transfer_s, others_s, load)
        return quote._replace(is_fetched=is_fetched)

    def local(self, decode: Site) -> Quote | None:
        own = decode.address, self._demand.num_tokens
        alone = self._costs.prefill_s(*own, decode.num_cached, decode.pace, decode.streams)
        if alone is None:
            return None
        raw_s = max(decode.queue_s, decode.room_s) + alone.total
        waiting = self._crowd + decode.num_behind
        others_s = waiting * alone.total + decode.streams.num * alone.felt
        return self._quote(None, decode, raw_s, alone.total, 0.0, others_s, decode.load)

    def _quote(
        self,
        prefill: Site | None,
        decode: Site,
        raw_s: float,
        prefill_s: float,
        transfer_s: float,
        others_s: float,
        load: int,
    ) -> Quote:
        demand, first = self._demand, prefill.address if prefill is not None else ""
        ttft_s = self._costs.way(first, decode.address).predict((1, raw_s))
        then = decode.forecast.from_then(ttft_s) if decode.forecast is not None else decode.streams
        joined = Streams(
            then.num + 1,
            then.context + demand.num_tokens + round(demand.num_outputs / 2),
        )
        step_s = self._costs.worker(decode.address).step_s(joined)
        tpot_s = step_s + transfer_s / max(1.0, demand.num_outputs)
        wanted = demand.objective
        missed = max(0.0, ttft_s / wanted.ttft_s - 1, tpot_s / wanted.tpot_s - 1)
        cost = _in_ties(ttft_s + transfer_s + others_s)
        name = f"{decode.name}/{prefill.name if prefill is not None else ''}"
        picks = decode.num_picks + (prefill.num_picks if prefill is not None else 0)
        return Quote(
            prefill=first,
            decode=decode.address,
            ttft_s=ttft_s,
            tpot_s=tpot_s,
            prefill_s=prefill_s,
            num_to_compute=demand.num_tokens - (prefill or decode).num_cached,
            transfer_s=transfer_s,
            others_s=others_s,
            raw_ttft_s=raw_s,
            rank=(missed, cost, load, picks, name),
        )


def _in_ties(seconds: float) -> float:
    return round(seconds / _TIE_S) * _TIE_S


class Crowd:
    """Prompts that are on a worker, on average over the last requests: as many as come to wait for
    what it is given, by the same token."""

    def __init__(self) -> None:
        self.mean = 0.0

    def note(self, nums: Sequence[int]) -> None:
        """Of each worker, as a request finds it."""
        if nums:
            self.mean += _WEIGHT * (sum(nums) / len(nums) - self.mean)


class Placement(NamedTuple):
    """What was chosen, and the best of the way not taken."""

    taken: Quote
    other: Quote | None
    all: tuple[Quote, ...] = ()

    def with_taken(self, quote: Quote) -> "Placement":
        """This one instead, and the best of the other way."""
        others = [other for other in self.all if bool(other.prefill) != bool(quote.prefill)]
        return Placement(quote, min(others, key=_rank, default=None), self.all)

    def cost_ms(self, address: str) -> float | None:
        """Of the best way over that worker, in whole milliseconds; None: nobody has reckoned."""
        quotes = [quote for quote in self.all if address in (quote.prefill, quote.decode)]
        return min((round(quote.cost_s * 1000) for quote in quotes), default=None)


def place(
    quotes: Quotes, pairs: Iterable[tuple[Site, Site]], decodes: Sequence[Site]
) -> Placement | None:
    """The best of all ways; None if of some pair, or of all, nothing is known: then nobody can say
    which is quicker. Without pairs it is the best decode worker, alone."""
    remote = [quotes.remote(prefill, decode) for prefill, decode in pairs]
    local = [quotes.local(decode) for decode in decodes]
    if None in remote or None in local:
        return None
    best = [min(found, key=_rank) for found in (_known(remote), _known(local)) if found]
    if not best:
        return None
    taken, *others = sorted(best, key=_rank)
    every = (*_known(remote), *_known(local))
    return Placement(taken, others[0] if others else None, every)


def _known(quotes: Sequence[Quote | None]) -> list[Quote]:
    return [quote for quote in quotes if quote is not None]


def _rank(quote: Quote) -> tuple[float, float, int, int, str]:
    return quote.rank


def each_pair(prefills: Sequence[Site], decodes: Sequence[Site]) -> Iterator[tuple[Site, Site]]:
    return ((prefill, decode) for prefill in prefills for decode in decodes)
