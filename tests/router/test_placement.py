"""A prompt goes where it is predicted to cost least; when speeds move, so does it."""

from dataclasses import replace
from math import inf

from hypothesis import given
from hypothesis import strategies as st

from router.cost_model import CostModel, Pace, Streams
from router.objective import Objective
from router.placement import Demand, Placement, Quotes, Site, each_pair, place

FAST = (1e-3, 5e-4, 1e-8, 1e-4, 0.0)
PREFILL = Site("p", queue_s=0.0, num_cached=0, pace=Pace(512), name="p")
DECODE = Site("d", queue_s=0.0, num_cached=0, pace=Pace(512), name="d")


def model(**weights: tuple[float, ...]) -> CostModel:
    costs = CostModel()
    for address, own in weights.items():
        costs.worker(address).told(own, (1, 0, 0, 9, 45), 0.0)
    return costs


def slower(weights: tuple[float, ...], factor: float) -> tuple[float, ...]:
    return tuple(factor * weight for weight in weights)


def placed(
    costs: CostModel, demand: Demand, prefills: list[Site], decodes: list[Site]
) -> Placement:
    found = place(Quotes(costs, demand), each_pair(prefills, decodes), decodes)
    assert found is not None
    return found


def test_short_and_cached_prompts_stay_and_long_ones_beside_streams_do_not() -> None:
    costs = model(p=FAST, d=FAST)
    busy = replace(DECODE, streams=Streams(4, 1000))
    short, long = Demand(8, 50), Demand(2000, 50)
    assert placed(costs, short, [PREFILL], [DECODE]).taken.prefill == ""
    assert placed(costs, long, [PREFILL], [busy]).taken.prefill == "p"
    cached = replace(busy, num_cached=1996)
    assert placed(costs, long, [PREFILL], [cached]).taken.prefill == ""  # another turn of a talk
    hurried = replace(long, token_nbytes=10**5)  # 0.2 GB over the link
    assert placed(costs, hurried, [PREFILL], [busy]).taken.prefill == "p"
    for _ in range(60):
        costs.link("p", "d").learn((1, 2 * 10**8), 2.0)
    assert placed(costs, hurried, [PREFILL], [busy]).taken.prefill == ""


def test_the_choice_moves_with_the_measured_speeds() -> None:
    demand, busy = Demand(600, 50), replace(DECODE, streams=Streams(2, 500))
    costs = model(p=FAST, d=FAST)
    assert placed(costs, demand, [PREFILL], [busy]).taken.prefill == "p"
    for _ in range(60):  # the prefill worker turns out ten times slower
        costs.way("p", "d").learn((1, 0.062), 0.62)
    chosen = placed(costs, demand, [PREFILL], [busy])
    assert chosen.taken.prefill == ""
    assert chosen.other is not None
    assert chosen.other.prefill == "p"
    for _ in range(60):
        costs.way("p", "d").learn((1, 0.062), 0.062)
    assert placed(costs, demand, [PREFILL], [busy]).taken.prefill == "p"


def test_of_two_pairs_the_one_with_the_faster_link_and_the_shorter_queue() -> None:
    costs = model(p=FAST, q=FAST, d=FAST)
    other = replace(PREFILL, address="q", name="q")
    demand = Demand(4000, 50, token_nbytes=1000)
    streams = replace(DECODE, streams=Streams(9, 900))
    assert placed(costs, demand, [PREFILL, other], [streams]).taken.prefill == "p"  # by name
    late = replace(PREFILL, queue_s=0.2)
    assert placed(costs, demand, [late, other], [streams]).taken.prefill == "q"
    for _ in range(60):
        costs.link("q", "d").learn((1, 4 * 10**6), 1.0)
    assert placed(costs, demand, [late, other], [streams]).taken.prefill == "p"
    holder = replace(other, num_cached=3900)
    assert placed(costs, demand, [late, holder], [streams]).taken.prefill == "p"
    idle = replace(PREFILL, address="p2", name="p2")  # taken to be as fast as its kind
    loaded = replace(PREFILL, load=3)
    assert placed(costs, demand, [loaded, idle], [streams]).taken.prefill == "p2"


def test_objectives_come_before_cost() -> None:
    costs = model(p=FAST, d=FAST, e=slower(FAST, 10))
    slow = replace(DECODE, address="e", name="e")
    busy = replace(DECODE, streams=Streams(60, 9000))
    demand = Demand(2000, 50)
    assert placed(costs, demand, [PREFILL], [busy, slow]).taken.decode == "d"
    strict = replace(demand, objective=Objective(tpot_s=0.02))
    assert placed(costs, strict, [PREFILL], [busy, slow]).taken.decode == "e"
    hopeless = replace(demand, objective=Objective(ttft_s=1e-3))  # none meets it: the nearest
    assert placed(costs, hopeless, [PREFILL], [busy, slow]).taken.rank[0] > 0


def test_nobody_guesses_where_nothing_is_known() -> None:
    quotes = Quotes(CostModel(), Demand(100, 10))
    assert place(quotes, each_pair([PREFILL], [DECODE]), [DECODE]) is None


sites = st.builds(
    Site,
    address=st.sampled_from(["p", "q"]),
    queue_s=st.floats(0, 5),
    num_cached=st.integers(0, 900),
    pace=st.builds(Pace, st.sampled_from([64, 512]), st.sampled_from([0.02, inf])),
    streams=st.builds(Streams, st.integers(0, 20), st.integers(0, 9000)),
    room_s=st.floats(0, 2),
)


@given(sites, sites, st.floats(0, 3), st.integers(0, 10), st.floats(0, 4))
def test_more_load_never_makes_a_worker_look_better(
    prefill: Site, decode: Site, more_s: float, more_streams: int, crowd: float
) -> None:
    decode = replace(decode, address="d")
    quotes = Quotes(model(p=FAST, q=slower(FAST, 2), d=FAST), Demand(1000, 20), crowd)
    before = quotes.remote(prefill, decode)
    after = quotes.remote(replace(prefill, queue_s=prefill.queue_s + more_s), decode)
    assert before is not None
    assert after is not None
    assert after.cost_s >= before.cost_s
    alone = quotes.local(decode)
    streams = Streams(decode.streams.num + more_streams, decode.streams.context + more_streams)
    crowded = quotes.local(replace(decode, queue_s=decode.queue_s + more_s, streams=streams))
    assert alone is not None
    assert crowded is not None
    assert crowded.cost_s >= alone.cost_s
    assert crowded.tpot_s >= alone.tpot_s
    if prefill.num_cached:
        cold = quotes.remote(replace(prefill, num_cached=0), decode)
        assert cold is not None
        assert cold.cost_s >= before.cost_s - 1e-9
