"""What `baton status` makes of what a router says; the screen itself is in tests/e2e/up."""

from hypothesis import given
from hypothesis import strategies as st

from deploy.status import KV_CELLS, KV_MARKS, kv_bar, ledger_problems
from router.cluster_view import Blocks

COUNT = st.integers(0, 5000)


@given(st.fixed_dictionaries(dict.fromkeys(KV_MARKS, COUNT)))
def test_a_bar_is_as_wide_as_any_other(blocks: dict[str, int]) -> None:
    bar = kv_bar(blocks, sum(blocks.values()))
    assert len(bar) == KV_CELLS
    assert set(bar) <= set(KV_MARKS.values())


def test_a_bar_shows_the_little_that_is_there() -> None:
    pool = dict.fromkeys(KV_MARKS, 0) | {"free": 9999, "held": 1}
    assert kv_bar(pool, 10000).count(KV_MARKS["held"]) == 1
    assert kv_bar(dict.fromkeys(KV_MARKS, 0), 0) == KV_MARKS["free"] * KV_CELLS
    assert kv_bar(dict.fromkeys(KV_MARKS, 0) | {"cached": 8}, 8) == KV_MARKS["cached"] * KV_CELLS


def test_a_bar_shows_what_is_pinned_and_not_as_free() -> None:
    blocks = Blocks(free=0, cached=0, pinned=KV_CELLS, promised=0, held=0, in_flight=0)
    assert set(KV_MARKS) == set(blocks.model_dump())
    assert kv_bar(blocks.model_dump(), KV_CELLS) == KV_MARKS["pinned"] * KV_CELLS


def books(worker: str, **changed: object) -> dict[str, object]:
    return {"worker": worker, "problem": None, "adds_up": True, "violations": 0, **changed}


def test_a_ledger_is_fine_or_says_why_not() -> None:
    assert ledger_problems({"workers": [books("decode-0")], "orphans": []}) == []
    orphan = {"worker": "decode-0", "owner": "abc-0", "age_ms": 61_000}
    workers = [books("a", problem="gone"), books("b", adds_up=False), books("c", violations=2)]
    assert ledger_problems({"workers": workers, "orphans": [orphan]}) == [
        "a does not tell its ledger (gone)",
        "b has blocks or slots that are nobody's",
        "c has blocks or slots that are nobody's",
        "decode-0: abc-0 is no request here (61 s)",
    ]
