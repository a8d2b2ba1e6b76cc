"""Every nanosecond goes to one part or to the residual, and to no other."""

from hypothesis import given
from hypothesis import strategies as st

from protos import serving_pb2 as pb
from router.clock import ClockReading
from router.leg_record import LegRecord
from router.timeline import PARTS, Part, Stage, rank_stages, share_out, stages

SPANS = st.lists(
    st.builds(
        lambda name, begin, length: Part(name, begin, begin + length),
        st.sampled_from(PARTS),
        st.integers(-20, 120),
        st.integers(-5, 60),
    ),
    max_size=12,
)


@given(st.integers(0, 50), st.integers(0, 60), SPANS)
def test_parts_and_residual_add_up(begin: int, length: int, found: list[Part]) -> None:
    shares = share_out(begin, begin + length, found)
    assert sum(shares.ns.values()) + shares.residual_ns == length
    assert shares.residual_ns >= 0
    assert all(ns > 0 for ns in shares.ns.values())
    expected: dict[str, int] = {}
    for moment in range(begin, begin + length):
        covering = [p.name for p in found if p.begin_ns <= moment < p.end_ns]
        if covering:
            owner = min(covering, key=PARTS.index)
            expected[owner] = expected.get(owner, 0) + 1
    assert shares.ns == expected


def leg(kind: str, timings: pb.Timings, clock: ClockReading | None) -> LegRecord:
    record = LegRecord(kind, "w", "w:1", 7, 1000)  # type: ignore[arg-type]
    record.timings, record.clock, record.end_ns = timings, clock, 9000
    return record


def span(begin_ns: int, end_ns: int) -> pb.Span:
    return pb.Span(begin_ns=begin_ns, end_ns=end_ns)


def test_stages_are_on_our_clock() -> None:
    timings = pb.Timings(queue=span(50, 60), build=span(60, 90), build_ns=30)
    (queue, build) = stages(leg("prefill", timings, ClockReading(-1000, 5)))
    assert (queue.name, queue.begin_ns, queue.end_ns) == ("queue", 1050, 1060)
    assert (build.name, build.begin_ns, build.end_ns, build.busy_ns) == ("build", 1060, 1090, 30)
    assert stages(leg("prefill", timings, None)) == []


def test_each_rank_has_its_stages_on_our_clock() -> None:
    timings = pb.Timings(pack=span(50, 90), pack_ns=30)
    timings.ranks.add(rank=0, pack=span(50, 70), pack_ns=20, kv_frames=3)
    timings.ranks.add(rank=1, pack=span(55, 90), pack_ns=30, ship=span(60, 95), ship_ns=35)
    (first, (packed,)), (_, others) = rank_stages(leg("prefill", timings, ClockReading(1000, 5)))
    assert (first.rank, first.kv_frames) == (0, 3)
    assert packed == Stage("pack", -950, -930, 20)
    assert others == [Stage("pack", -945, -910, 30), Stage("ship", -940, -905, 35)]
    assert rank_stages(leg("prefill", timings, None)) == []


def test_a_decode_leg_that_was_ended_from_here_decoded_until_then() -> None:
    timings = pb.Timings(queue=span(10, 20), install=span(30, 40), attach=span(40, 45))
    found = stages(leg("decode", timings, ClockReading(0, 0)))
    assert [stage.name for stage in found] == ["queue", "install", "attach", "decode"]
    assert (found[-1].begin_ns, found[-1].end_ns) == (45, 9000)
