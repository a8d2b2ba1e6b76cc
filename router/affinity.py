"""Requests of one session to one pair of workers, as far as balance allows. Pure.

A session has a home in each role: the worker with the highest hash of (session, address), among
those that are there (rendezvous hashing, Thaler and Ravishankar 1998). When a worker goes, only
its own sessions move, and every router knows a home without asking anybody.

Prefix affinity needs no rule: what is cached costs less (router/placement.py). A holder is taken
while what it saves is worth its queue, so a hot prefix spreads by itself once its holder is busy:
wait there, or compute it elsewhere, whichever is quicker, as Mooncake's Conductor decides
(arXiv 2407.00079). Nor can affinity starve balance: no worker is chosen for its cache whose queue
is longer than another's by more than the prompt could save there.
"""

import hashlib
from collections.abc import Iterable, Sequence
from typing import Literal

from router.placement import Placement, Quote, Site

SessionAffinity = Literal["off", "soft", "hard"]

_BOUND = 2.0
"""A hard session's home may have so many times the mean load, and one more request."""


def home(session: str, addresses: Iterable[str]) -> str:
    """Empty if there is nobody."""
    return max(addresses, key=lambda address: _score(session, address), default="")


def _score(session: str, address: str) -> bytes:
    return hashlib.blake2b(f"{len(session)}:{session}{address}".encode(), digest_size=8).digest()


def is_within_bound(site: Site, sites: Sequence[Site]) -> bool:
    """Its load is not far above what all have on average."""
    mean = sum(other.load for other in sites) / len(sites)
    return site.load <= _BOUND * mean + 1


def keep_session(
    placement: Placement,
    session: str,
    affinity: SessionAffinity,
    prefills: Sequence[Site],
    decodes: Sequence[Site],
) -> Placement:
    """The best way over the session's homes, if it is not too dear. `soft`: it costs no more above
    the best than computing the prompt would: what its next turn saves there. `hard`: whatever it
    costs, while the homes are within the bound of load. It never misses the objective by more."""
    if affinity == "off" or not session or not placement.all:
        return placement
    at_decode = home(session, (site.address for site in decodes))
    at_prefill = home(session, (site.address for site in prefills))
    ways = [
        quote
        for quote in placement.all
        if quote.decode == at_decode and quote.prefill in ("", at_prefill)
    ]
    best = placement.taken
    if not ways or best in ways:
        return placement
    wanted = min(ways, key=lambda quote: quote.rank)
    sites = {site.address: site for site in (*prefills, *decodes)}
    if wanted.rank[0] > best.rank[0] or not _is_worth_it(wanted, best, affinity):
        return placement
    if not is_within_bound(sites[wanted.decode], decodes):
        return placement
    if wanted.prefill and not is_within_bound(sites[wanted.prefill], prefills):
        return placement
    return placement.with_taken(wanted)


def _is_worth_it(wanted: Quote, best: Quote, affinity: SessionAffinity) -> bool:
    return affinity == "hard" or wanted.cost_s - best.cost_s <= best.prefill_s
