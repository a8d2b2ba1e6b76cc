"""Filter, score, pick."""

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from router.policy import judge_decodes, judge_prefills, pick_pair, pick_prefill


@dataclass(frozen=True)
class Known:
    name: str
    load: int = 0
    fingerprint: bytes = b"f"
    is_ready: bool = True
    num_picks: int = 0
    address: str = ""


WORKERS = st.lists(
    st.builds(
        Known,
        name=st.uuids().map(str),
        load=st.integers(0, 9),
        fingerprint=st.sampled_from([b"f", b"g"]),
        is_ready=st.booleans(),
        num_picks=st.integers(0, 3),
        address=st.sampled_from(["", "a:1", "b:1"]),
    ),
    max_size=5,
)


@given(WORKERS, WORKERS)
def test_a_pair_is_ready_agrees_and_is_the_least_loaded(
    decodes: list[Known], prefills: list[Known]
) -> None:
    pair = pick_pair(decodes, prefills)
    able = [
        (decode.load + prefill.load)
        for decode in decodes
        for prefill in prefills
        if decode.is_ready and prefill.is_ready and decode.fingerprint == prefill.fingerprint
        if not decode.address or decode.address != prefill.address
    ]
    if pair is None:
        assert not any(decode.is_ready for decode in decodes)
    elif pair.prefill is None:
        assert pair.decode.is_ready
        assert not able
    else:
        assert pair.decode.is_ready
        assert pair.prefill.is_ready
        assert pair.decode.fingerprint == pair.prefill.fingerprint
        assert pair.decode.address == "" or pair.decode.address != pair.prefill.address
        assert pair.decode.load + pair.prefill.load == min(able)


def test_of_equals_the_one_picked_least_often() -> None:
    workers = [Known("a", num_picks=3), Known("b", num_picks=1), Known("c", load=1)]
    assert pick_prefill(workers) == workers[1]


def test_another_fingerprint_is_no_partner() -> None:
    stranger = Known("p", fingerprint=b"g")
    assert pick_prefill([stranger], b"f") is None
    assert pick_prefill([stranger]) == stranger


def test_a_decode_worker_with_a_partner_goes_before_an_idle_one_without() -> None:
    busy, lonely = Known("busy", load=9), Known("lonely", fingerprint=b"g")
    pair = pick_pair([lonely, busy], [Known("p")])
    assert pair is not None
    assert pair.decode == busy


@given(WORKERS, WORKERS, st.sets(st.integers(0, 4)))
def test_every_candidate_is_judged_and_the_taken_one_is_best(
    decodes: list[Known], prefills: list[Known], failed: set[int]
) -> None:
    left_out = [worker for index, worker in enumerate(decodes) if index in failed]

    def excluded(worker: Known) -> str:
        return "failed_this_prompt" if worker in left_out else ""

    fresh = [worker for worker in decodes if worker not in left_out]
    pair = pick_pair(fresh, prefills)
    taken = pair.decode if pair is not None else None
    verdicts = judge_decodes(decodes, prefills, taken, excluded)
    assert sorted(one.worker for one in verdicts) == sorted(worker.name for worker in decodes)
    assert [one.why for one in verdicts].count("taken") == (pair is not None)
    if pair is not None:
        assert verdicts[0].worker == pair.decode.name
        compared = ("more_loaded", "picked_more_often", "later_name")
        assert all(v.load >= verdicts[0].load for v in verdicts if v.why in compared)
    by_name = {worker.name: worker for worker in decodes}
    for verdict in verdicts:
        worker = by_name[verdict.worker]
        assert (verdict.why == "failed_this_prompt") == (worker in left_out)
        assert verdict.why != "not_ready" or not worker.is_ready


@given(WORKERS, st.sampled_from([b"f", b"g", None]))
def test_prefill_verdicts_agree_with_the_pick(
    prefills: list[Known], fingerprint: bytes | None
) -> None:
    taken = pick_prefill(prefills, fingerprint)
    verdicts = judge_prefills(prefills, taken, fingerprint)
    assert len(verdicts) == len(prefills)
    if taken is not None:
        assert (verdicts[0].worker, verdicts[0].why) == (taken.name, "taken")
    assert [one.why for one in verdicts].count("taken") == (taken is not None)
    strangers = {
        w.name for w in prefills if w.is_ready and fingerprint not in (None, w.fingerprint)
    }
    assert {one.worker for one in verdicts if one.why == "other_fingerprint"} == strangers


def test_why_the_others_were_not_taken() -> None:
    best, busy = Known("a"), Known("b", load=2)
    often, late, gone = Known("c", num_picks=1), Known("d"), Known("e", is_ready=False)
    full = Known("f")
    verdicts = judge_prefills(
        [gone, busy, often, late, best, full],
        best,
        excluded=lambda worker: "queue_full" if worker is full else "",
    )
    assert [(one.worker, one.load, one.why) for one in verdicts] == [
        ("a", 0, "taken"),
        ("d", 0, "later_name"),
        ("c", 0, "picked_more_often"),
        ("b", 2, "more_loaded"),
        ("e", 0, "not_ready"),
        ("f", 0, "queue_full"),
    ]
    lonely = Known("lonely", fingerprint=b"g")
    (_, other) = judge_decodes([lonely, busy], [Known("p")], busy)
    assert other.why == "no_partner"
