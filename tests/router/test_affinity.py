"""Sessions stay together while that is worth it, and nobody is starved for it."""

from dataclasses import replace
from math import inf

from hypothesis import given
from hypothesis import strategies as st

from router.affinity import home, is_within_bound, keep_session
from router.cost_model import CostModel
from router.objective import Objective
from router.placement import Demand, Placement, Quotes, Site, each_pair, place

TOKEN_S = 1e-3
NAMES = [f"p{index}" for index in range(4)]
DECODES = [Site(f"d{index}", 0.0, 0, name=f"d{index}") for index in range(3)]


def model() -> CostModel:
    costs = CostModel()
    for address in (*NAMES, *(site.address for site in DECODES)):
        costs.worker(address).told((0.0, 1e-3, 0.0, TOKEN_S, 0.0), (1, 0, 0, 9, 45), 0.0)
    return costs


COSTS = model()


def placed(
    prefills: list[Site], num_tokens: int = 1000, crowd: float = 0.0, ttft_s: float = inf
) -> Placement:
    demand = Demand(num_tokens, 20, objective=Objective(ttft_s))
    found = place(Quotes(COSTS, demand, crowd), each_pair(prefills, DECODES), [])
    assert found is not None
    return found


prefills = st.lists(
    st.tuples(st.floats(0, 5), st.integers(0, 999), st.integers(0, 30)), min_size=4, max_size=4
).map(
    lambda told: [
        Site(name, queue_s, num_cached, load=load, name=name)
        for name, (queue_s, num_cached, load) in zip(NAMES, told, strict=True)
    ]
)


@given(prefills, st.floats(0, 5))
def test_a_cache_is_not_worth_a_longer_queue_than_it_saves(sites: list[Site], crowd: float) -> None:
    """So no worker starves, and a herd that follows a prefix is bounded."""
    taken = placed(sites, crowd=crowd).taken
    site = next(one for one in sites if one.address == taken.prefill)
    for other in sites:
        saved_s = (1 + crowd) * TOKEN_S * max(0, site.num_cached - other.num_cached)
        assert site.queue_s <= other.queue_s + saved_s + 2e-3


@given(st.integers(1, 60), st.integers(0, 990))
def test_a_hot_prefix_spreads_when_its_holder_is_busy(num: int, num_cached: int) -> None:
    """Prompts of one moment: the holder has no more ahead of it than the prefix saves."""
    sites = [Site(name, 0.0, 0, name=name) for name in NAMES]
    sites[0] = replace(sites[0], num_cached=num_cached)
    for _ in range(num):
        taken = placed(sites).taken.prefill
        index = NAMES.index(taken)
        queue_s = sites[index].queue_s + TOKEN_S * (1000 - sites[index].num_cached)
        sites[index] = replace(sites[index], queue_s=queue_s, num_cached=max(num_cached, 1))
    queues = [site.queue_s for site in sites]
    assert max(queues) - min(queues) <= TOKEN_S * (1000 + num_cached) + 0.01


@given(prefills, st.text(max_size=8), st.sampled_from(["soft", "hard"]), st.floats(0.1, 9))
def test_a_session_never_goes_beyond_its_bounds(
    sites: list[Site], session: str, affinity: str, ttft_s: float
) -> None:
    before = placed(sites, ttft_s=ttft_s)
    after = keep_session(before, session, affinity, sites, DECODES)  # type: ignore[arg-type]
    assert after.taken in before.all
    if after.taken == before.taken:
        return
    assert after.taken.prefill == home(session, NAMES)
    assert after.taken.decode == home(session, [site.address for site in DECODES])
    assert after.taken.rank[0] <= before.taken.rank[0]
    site = next(one for one in sites if one.address == after.taken.prefill)
    assert site.load <= 2 * sum(one.load for one in sites) / len(sites) + 1
    if affinity == "soft":
        assert after.taken.cost_s <= before.taken.cost_s + before.taken.prefill_s


def test_soft_gives_way_where_hard_does_not() -> None:
    session = next(f"s{n}" for n in range(99) if home(f"s{n}", NAMES) == "p3")
    idle = [Site(name, 0.0, 0, name=name) for name in NAMES]
    assert placed(idle).taken.prefill == "p0"
    for affinity in ("soft", "hard"):
        kept = keep_session(placed(idle), session, affinity, idle, DECODES)
        assert kept.taken.prefill == "p3"
    assert keep_session(placed(idle), session, "off", idle, DECODES).taken.prefill == "p0"
    busy = [*idle[:3], replace(idle[3], queue_s=5.0)]
    assert keep_session(placed(busy), session, "soft", busy, DECODES).taken.prefill == "p0"
    assert keep_session(placed(busy), session, "hard", busy, DECODES).taken.prefill == "p3"
    crowded = [*idle[:3], replace(idle[3], load=50)]
    assert not is_within_bound(crowded[3], crowded)
    assert keep_session(placed(crowded), session, "hard", crowded, DECODES).taken.prefill == "p0"


@given(st.lists(st.text(max_size=6), max_size=40, unique=True))
def test_only_the_sessions_of_a_worker_that_goes_move(sessions: list[str]) -> None:
    for session in sessions:
        before = home(session, NAMES)
        after = home(session, NAMES[1:])
        assert before in (NAMES[0], after)


def test_sessions_are_spread() -> None:
    homes = [home(f"session {n}", NAMES) for n in range(400)]
    assert all(60 < homes.count(name) < 140 for name in NAMES)
