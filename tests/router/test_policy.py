"""Filter, score, pick."""

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from router.policy import pick_pair, pick_prefill


@dataclass(frozen=True)
class Known:
    name: str
    load: int = 0
    fingerprint: bytes = b"f"
    is_ready: bool = True
    num_picks: int = 0


WORKERS = st.lists(
    st.builds(
        Known,
        name=st.uuids().map(str),
        load=st.integers(0, 9),
        fingerprint=st.sampled_from([b"f", b"g"]),
        is_ready=st.booleans(),
        num_picks=st.integers(0, 3),
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
