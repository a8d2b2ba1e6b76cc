"""Routing rules for the replay: the router's own, and those it is to be better than.

* `least-requests`, `least-queue`: least load, by requests or by what is to be computed.
* `queue+uncached`: least queue and prefill of what is not cached.
* `conductor`: Mooncake's Algorithm 1 (arXiv 2407.00079): a prefix is fetched where the best holder
  has more of it than the worker by a factor.
* `lmetric`: least (new prefill tokens x batch size), queued ones included (OSDI '26).
* `baton`: router/placement.py as it runs in the router, with the same cost model.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bench.replay_workers import SimWorker
from bench.traces import Arrival
from router.cost_model import CostModel
from router.placement import Crowd, Demand, Quotes, Site, each_pair, place
from router.prefill_queue import PrefillQueue

_BALANCING_THRESHOLD = 1.0
"""Mooncake's kvcache_balancing_threshold."""


@dataclass(frozen=True, slots=True)
class View:
    """A worker as an arrival finds it."""

    worker: SimWorker
    num_cached: int
    queue_s: float
    num_requests: int


@dataclass(frozen=True, slots=True)
class Hardware:
    tokens_per_s: float
    fetch_tokens_per_s: float
    """Of KV between prefill workers; 0: it cannot be fetched."""


@dataclass(frozen=True, slots=True)
class Pick:
    index: int
    num_known: int
    """Tokens that need not be computed."""
    fetch_s: float = 0.0


Rule = Callable[[Arrival, Sequence[View]], Pick]


def _least(views: Sequence[View], key: Callable[[View], float]) -> Pick:
    index = min(range(len(views)), key=lambda i: (key(views[i]), views[i].queue_s, i))
    return Pick(index, views[index].num_cached)


def least_requests(hardware: Hardware) -> Rule:
    return lambda arrival, views: _least(views, lambda view: view.num_requests)


def least_queue(hardware: Hardware) -> Rule:
    return lambda arrival, views: _least(views, lambda view: view.queue_s)


def queue_uncached(hardware: Hardware) -> Rule:
    def rule(arrival: Arrival, views: Sequence[View]) -> Pick:
        def ttft_s(view: View) -> float:
            return view.queue_s + (arrival.num_tokens - view.num_cached) / hardware.tokens_per_s

        return _least(views, ttft_s)

    return rule


def lmetric(hardware: Hardware) -> Rule:
    def rule(arrival: Arrival, views: Sequence[View]) -> Pick:
        def metric(view: View) -> float:
            queued = view.queue_s * hardware.tokens_per_s
            return (queued + arrival.num_tokens - view.num_cached) * (view.num_requests + 1)

        return _least(views, metric)

    return rule


def conductor(hardware: Hardware) -> Rule:
    def rule(arrival: Arrival, views: Sequence[View]) -> Pick:
        best = max(view.num_cached for view in views)
        picks = []
        for index, view in enumerate(views):
            own, fetch_s = view.num_cached, 0.0
            known = own
            if hardware.fetch_tokens_per_s and best > _BALANCING_THRESHOLD * own:
                known, fetch_s = best, (best - own) / hardware.fetch_tokens_per_s
            rest_s = (arrival.num_tokens - known) / hardware.tokens_per_s
            picks.append((fetch_s + view.queue_s + rest_s, index, Pick(index, known, fetch_s)))
        return min(picks, key=lambda one: one[:2])[2]

    return rule


def baton(hardware: Hardware) -> Rule:
    costs, crowd = CostModel(), Crowd()
    queues: dict[str, PrefillQueue] = {}
    decode = Site("decode", 0.0, 0, name="decode")
    costs.worker("decode").told((0.0,) * 5, (), 0.0)

    def site(arrival: Arrival, view: View, best: int) -> Site:
        name = view.worker.name
        if name not in queues:
            weights = (0.0, 0.0, 0.0, 1 / hardware.tokens_per_s, 0.0)
            costs.worker(name).told(weights, (1, 0, 0, 1, 1), 0.0)
            queues[name] = PrefillQueue(view.worker.ageing)
        fetch = hardware.fetch_tokens_per_s
        num_left = arrival.num_tokens - view.num_cached
        wait = queues[name].look(arrival.at_s, num_left, view.queue_s)
        return Site(
            name,
            wait.ahead_s,
            view.num_cached,
            num_behind=wait.num_behind,
            load=view.num_requests,
            name=name,
            num_fetchable=best if fetch else 0,
            fetch_s=(best - view.num_cached) / fetch if fetch else 0.0,
        )

    def rule(arrival: Arrival, views: Sequence[View]) -> Pick:
        crowd.note([view.num_requests for view in views])
        best = max(view.num_cached for view in views)
        sites = [site(arrival, view, best) for view in views]
        quotes = Quotes(costs, Demand(arrival.num_tokens, arrival.num_outputs), crowd.mean)
        found = place(quotes, each_pair(sites, [decode]), [])
        assert found is not None, "all workers are known"
        taken = found.taken
        index = next(i for i, one in enumerate(sites) if one.address == taken.prefill)
        chosen = sites[index]
        num_known, fetch_s = chosen.num_cached, 0.0
        if taken.is_fetched:
            num_known, fetch_s = chosen.num_fetchable, chosen.fetch_s
        num_left = arrival.num_tokens - num_known
        queues[chosen.name].add(arrival.at_s, num_left, taken.prefill_s)
        return Pick(index, num_known, fetch_s)

    return rule


RULES: dict[str, Callable[[Hardware], Rule]] = {
    "least-requests": least_requests,
    "least-queue": least_queue,
    "queue+uncached": queue_uncached,
    "conductor": conductor,
    "lmetric": lmetric,
    "baton": baton,
}
