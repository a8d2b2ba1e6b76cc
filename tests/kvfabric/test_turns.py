"""Turns of transfers, without transfers."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from kvfabric.turns import Turns

QUANTUM = 100


def drive(queues: dict[str, list[int]]) -> list[tuple[str, int]]:
    """What goes, in order, of queues of sizes that are there from the start."""
    turns: Turns[str] = Turns(QUANTUM)
    for one in queues:
        turns.add(one)

    def first(name: str) -> int | None:
        return queues[name][0] if queues[name] else None

    gone = []
    while name := turns.next(first):
        gone.append((name, queues[name].pop(0)))
    return gone


def test_full_ones_take_turns() -> None:
    gone = drive({"a": [100, 100], "b": [100, 100, 100], "c": [100]})
    assert [name for name, _ in gone] == ["a", "b", "c", "a", "b", "b"]


def test_small_ones_share_a_turn() -> None:
    gone = drive({"a": [100, 100], "b": [30, 30, 30, 30]})
    assert [name for name, _ in gone] == ["a", "b", "b", "b", "a", "b"]


def test_what_has_no_bytes_waits_for_nobody() -> None:
    gone = drive({"a": [100, 100], "b": [100, 0]})
    assert gone == [("a", 100), ("b", 100), ("b", 0), ("a", 100)]


def test_who_comes_has_its_turn_after_the_one_under_way() -> None:
    turns: Turns[str] = Turns(QUANTUM)
    assert turns.next(lambda _: 1) is None
    turns.add("a")
    assert turns.next(lambda _: 100) == "a"
    turns.add("b")
    assert turns.next(lambda _: 100) == "b"
    turns.remove("b")
    assert turns.next(lambda _: 100) == "a"
    assert turns.next(lambda _: None) is None


def test_what_went_without_asking_counts_too() -> None:
    turns: Turns[str] = Turns(QUANTUM)
    for name in "abc":
        turns.add(name)
    turns.took("b", 60)
    turns.took("b", 40)
    assert [turns.next(lambda _: 100) for _ in range(3)] == ["c", "a", "b"]


@given(st.lists(st.lists(st.integers(0, QUANTUM), max_size=12), min_size=2, max_size=5))
def test_who_waits_sees_one_turn_of_each_other_at_most(sizes: list[list[int]]) -> None:
    gone = drive({str(i): list(queue) for i, queue in enumerate(sizes)})
    for name, queue in enumerate(sizes):
        assert [size for one, size in gone if one == str(name)] == queue
        waits, since = len(queue), Counter[str]()
        for one, size in gone:
            if one == str(name):
                waits, since = waits - 1, Counter()
            elif waits:
                since[one] += size
                assert since[one] <= QUANTUM
