"""Who goes next: no starvation, bounded service difference, somebody always, floods drown alone."""

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from router.fair_queue import RESERVE, STEP_S, FairQueue
from router.tenant import Tenant

A, B, C = (Tenant(name) for name in "abc")


def taken(queue: FairQueue[str], count: int) -> list[str]:
    items = []
    for _ in range(count):
        head = queue.head()
        assert head is not None
        queue.take(head)
        items.append(head.item)
    return items


def test_one_tenant_is_first_come_first_served() -> None:
    queue = FairQueue[str](10)
    for index in range(4):
        queue.put(str(index), A, 1, now_s=float(index))
    assert taken(queue, 4) == ["0", "1", "2", "3"]
    assert queue.head() is None
    assert len(queue) == 0


def test_a_greedy_tenant_waits_for_itself() -> None:
    queue = FairQueue[str](1000)
    for _ in range(100):
        queue.put("greedy", A, 10, now_s=0)
    queue.take(queue.put("greedy", A, 10, now_s=0)[0])
    for _ in range(5):
        queue.put("modest", B, 10, now_s=1)
    assert Counter(taken(queue, 10)) == {"modest": 5, "greedy": 5}


def test_idling_saves_nothing_up() -> None:
    queue = FairQueue[str](1000)
    for index in range(200):
        queue.put("a", A, 10, now_s=index)
    taken(queue, 100)
    for index in range(100):
        queue.put("b", B, 10, now_s=200 + index)
    assert abs(taken(queue, 20).count("b") - 10) <= 1


def test_who_comes_to_an_empty_queue_begins_where_the_last_left() -> None:
    queue = FairQueue[str](10)
    queue.put("a", A, 100, now_s=0)
    taken(queue, 1)
    queue.put("b", B, 1, now_s=1)
    assert queue.counter("b") == queue.counter("a") == 100


def test_outputs_count_too_and_weights_divide() -> None:
    queue = FairQueue[str](1000)
    heavy = Tenant("heavy", weight=3)
    for _ in range(300):
        queue.put("heavy", heavy, 1, now_s=0)
        queue.put("a", A, 1, now_s=0)
    assert abs(taken(queue, 40).count("heavy") - 30) <= 1
    queue.charge(heavy, 30)  # ten turns of a's
    assert taken(queue, 10).count("a") >= 9


def test_better_priorities_go_first_and_the_others_do_not_starve() -> None:
    queue = FairQueue[str](1000)
    urgent, later, last = Tenant("u", -5), Tenant("l", 3), Tenant("z", 10)
    for tenant in (last, later, urgent):
        for _ in range(200):
            queue.put(tenant.name, tenant, 1, now_s=0)
    counts = Counter(taken(queue, 20 * RESERVE))
    assert counts == {"u": 20 * RESERVE - 20, "l": 10, "z": 10}


def test_a_requests_priority_orders_its_own_tenant_only() -> None:
    queue = FairQueue[str](10)
    queue.put("b", B, 1, now_s=0)
    queue.put("a", A, 1, now_s=0)
    queue.put("a, urgent", A, 1, now_s=1, priority=-1)
    assert taken(queue, 3) == ["b", "a, urgent", "a"]


def test_a_step_of_priority_is_worth_a_while_and_no_more() -> None:
    queue = FairQueue[str](10)
    queue.put("patient", A, 1, now_s=0, priority=1)
    queue.put("late", A, 1, now_s=STEP_S + 1)
    assert taken(queue, 2) == ["patient", "late"]


def test_when_it_is_full_the_longest_line_loses_its_last() -> None:
    queue = FairQueue[str](3)
    for index in range(3):
        queue.put(f"a{index}", A, 1, now_s=index)
    _, victim = queue.put("b", B, 1, now_s=3)
    assert victim is not None
    assert victim.item == "a2"
    mine, victim = queue.put("a3", A, 1, now_s=4)
    assert victim is mine
    mine, victim = queue.put("a, urgent", A, 1, now_s=4, priority=-2)
    assert victim is not None
    assert victim.item == "a1"
    assert len(queue) == 3


def test_dropping_twice_is_harmless() -> None:
    queue = FairQueue[str](3)
    entry, _ = queue.put("a", A, 5, now_s=0)
    queue.put("b", A, 5, now_s=0)
    queue.drop(entry)
    queue.drop(entry)
    assert len(queue) == 1
    assert queue.counter("a") == 0


STEPS = st.lists(
    st.tuples(
        st.sampled_from("pttco"),  # put, take (twice as often), cancel, output
        st.integers(0, 3),
        st.integers(1, 100),
        st.integers(-3, 3),
    ),
    max_size=300,
)


@settings(max_examples=40, deadline=None)
@given(STEPS, st.integers(1, 20))
def test_the_sum_is_right_and_somebody_is_always_next(
    steps: list[tuple[str, int, int, int]], max_len: int
) -> None:
    queue = FairQueue[int](max_len)
    tenants = [Tenant(str(i), priority=i % 2, weight=1 + i / 2) for i in range(4)]
    waiting = {}
    counters = dict.fromkeys("0123", 0.0)
    for number, (what, who, cost, priority) in enumerate(steps):
        if what == "p":
            entry, victim = queue.put(number, tenants[who], cost, float(number), priority)
            waiting[number] = entry
            if victim is not None:
                del waiting[victim.item]
        elif what == "c" and waiting:
            queue.drop(waiting.pop(next(iter(waiting))))
        elif what == "o":
            queue.charge(tenants[who], cost)
        elif what == "t" and (head := queue.head()) is not None:
            assert waiting.pop(head.item) is head
            queue.take(head)
        assert len(queue) == len(waiting) <= max_len
        assert set(queue) == set(waiting.values())
        assert (queue.head() is None) == (not waiting)
        for name in counters:  # nobody's service is ever forgotten
            assert queue.counter(name) >= counters[name]
            counters[name] = queue.counter(name)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(1, 100)), min_size=30, max_size=120),
    st.data(),
)
def test_who_always_waits_is_served_alike(
    costs: list[tuple[int, int]], data: st.DataObject
) -> None:
    """Theorem 4.4 of the paper: the difference is at most twice the larger of a prompt's worth and
    of what runs. Here outputs come after the fact, up to 50 at a time, of what was taken."""
    queue = FairQueue[int](10_000)
    largest, most_running = max(cost for _, cost in costs), 50.0
    for who, cost in costs:
        queue.put(who, (A, B, C)[who], cost, now_s=0)
    served = dict.fromkeys(range(3), 0.0)
    names = [name for name in range(3) if any(who == name for who, _ in costs)]
    while all(any(entry.item == name for entry in queue) for name in names):
        head = queue.head()
        assert head is not None
        queue.take(head)
        served[head.item] += head.cost
        owed = data.draw(st.floats(0, most_running)) if data.draw(st.booleans()) else 0.0
        queue.charge(head.tenant, owed)
        served[head.item] += owed
        spread = max(served[name] for name in names) - min(served[name] for name in names)
        assert spread <= 2 * (largest + most_running)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(-3, 3), min_size=1, max_size=6, unique=True), st.integers(1, 60))
def test_nobody_starves(priorities: list[int], num: int) -> None:
    """One of each level waits behind a flood of all better ones; its turn comes in bounded time."""
    queue = FairQueue[str](100_000)
    bound = RESERVE * len(priorities) + RESERVE
    for priority in priorities:
        for _ in range(num + bound):
            queue.put(str(priority), Tenant(str(priority), priority), 1, now_s=0)
    items = taken(queue, num + bound)
    for priority in priorities:
        at = [i for i, item in enumerate(items) if item == str(priority)]
        gaps = [b - a for a, b in zip([-1, *at], [*at, len(items)], strict=True)]
        assert max(gaps) <= bound
