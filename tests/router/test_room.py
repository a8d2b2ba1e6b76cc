"""When a prompt is sent on, and when it is better off in the router's queue."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from router.room import FEW, OnTheWay, Spot, has_room

AHEAD_S = 2.0
IDLE = Spot(0, 0, 0.0, max_num_seqs=4)
BUSY_PREFILL = Spot(FEW, FEW, 5.0)
NOBODY = OnTheWay()


def room(
    decodes: list[Spot], prefills: list[Spot], on_the_way: OnTheWay = NOBODY, ahead_s: float = 2.0
) -> bool:
    return has_room(decodes, prefills, on_the_way, ahead_s)


def test_idle_workers_have_room_and_nobody_is_not_a_full_cluster() -> None:
    assert room([IDLE], [IDLE])
    assert room([], [])
    assert room([], [BUSY_PREFILL])


def test_decode_takes_what_it_runs_and_a_few() -> None:
    full = replace(IDLE, num_there=4 + FEW)
    assert not room([full], [IDLE])
    assert room([full, replace(IDLE, num_there=3 + FEW)], [IDLE])
    assert not room([replace(IDLE, num_there=5, num_queued=FEW)], [IDLE])
    assert room([replace(full, max_num_seqs=0)], [IDLE])  # it does not say


def test_prefill_takes_a_few_or_a_little() -> None:
    decode = replace(IDLE, num_there=1)
    assert not room([decode], [BUSY_PREFILL])
    assert room([decode], [replace(BUSY_PREFILL, num_queued=FEW - 1)])
    assert room([decode], [replace(BUSY_PREFILL, ahead_s=1.9)])
    assert room([decode], [BUSY_PREFILL, replace(BUSY_PREFILL, ahead_s=0)])


def test_an_idle_decode_worker_may_compute_one_itself() -> None:
    assert room([IDLE], [BUSY_PREFILL])
    assert not room([IDLE], [BUSY_PREFILL], OnTheWay(1, 1, 0.0))


def test_decode_alone_is_judged_by_its_own_queue() -> None:
    assert room([replace(IDLE, num_there=8, num_queued=2, ahead_s=9.0)], [])
    assert not room([replace(IDLE, num_there=4 + FEW, num_queued=2)], [])


def test_what_is_on_its_way_counts() -> None:
    decode, prefill = replace(IDLE, num_there=1), replace(BUSY_PREFILL, num_queued=FEW - 3)
    assert room([decode], [prefill], OnTheWay(2, 2, 0.0))
    assert not room([decode], [prefill], OnTheWay(3, 3, 0.0))
    assert not room([decode], [IDLE], OnTheWay(1, 3 + FEW, 0.0))
    late = replace(BUSY_PREFILL, ahead_s=1.0)
    assert room([decode], [late], OnTheWay(9, 1, 0.9))
    assert not room([decode], [late], OnTheWay(9, 1, 1.1))


SPOTS = st.lists(
    st.builds(Spot, st.integers(0, 20), st.integers(0, 20), st.floats(0, 5), st.integers(0, 20)),
    min_size=1,
    max_size=4,
)


@given(SPOTS, SPOTS, st.integers(0, 20), st.integers(0, 20))
def test_more_load_never_makes_room(
    decodes: list[Spot], prefills: list[Spot], num: int, more: int
) -> None:
    def fuller(spots: list[Spot]) -> list[Spot]:
        return [
            replace(
                spot,
                num_there=spot.num_there + more,
                num_queued=spot.num_queued + more,
                ahead_s=spot.ahead_s + more,
            )
            for spot in spots
        ]

    before = room(decodes, prefills, OnTheWay(num, num, num / 10))
    after = room(fuller(decodes), fuller(prefills), OnTheWay(num + more, num + more, num / 10))
    assert before or not after
