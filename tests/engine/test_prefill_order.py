"""Who goes first among prompts: nobody waits for ever, and shorter ones do not wait for longer."""

from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.prefill_order import AGEING
from engine.request import Leg
from engine.sequence import Sequence, Status
from tests.engine.requests import make_request
from tests.engine.scheduler_drive import Drive

Policy = Literal["fcfs", "srf"]


def roomy(policy: Policy, **settings: int) -> Drive:
    limits = {"num_blocks": 5000, "block_size": 16, "max_num_seqs": 200, "max_model_len": 5000}
    return Drive.build(prefill_policy=policy, **{**limits, **settings})  # type: ignore[arg-type]


def prefill(drive: Drive, name: str, prompt_len: int) -> Sequence:
    return drive.submit(make_request(name, prompt_len=prompt_len, leg=Leg.PREFILL))


def step(drive: Drive) -> dict[str, int]:
    return {done.seq.request_id: done.num_tokens for done in drive.step()}


@pytest.mark.parametrize(
    ("policy", "second"),
    [("fcfs", {"long": 100}), ("srf", {"tiny": 10, "short": 40, "long": 50})],
)
def test_a_long_prompt_under_way_is_passed_between_two_chunks(
    policy: Policy, second: dict[str, int]
) -> None:
    drive = roomy(policy, token_budget=100)
    prefill(drive, "long", 1000)
    assert step(drive) == {"long": 100}
    prefill(drive, "short", 40)
    prefill(drive, "tiny", 10)
    assert step(drive) == second


def test_shorter_prompts_that_keep_coming_pass_only_so_far() -> None:
    drive = roomy("srf", token_budget=100)
    long = prefill(drive, "long", 1000)
    num_passed = 0
    while long.status is not Status.HELD:
        prefill(drive, f"short {drive.num_submitted}", 100)  # as much as a step holds
        computed = step(drive)
        num_passed += "long" not in computed
        assert len(drive.seqs) < 100, "it starves"
    # short n = 0, 1, … passes iff 100 + AGEING * 100 (n + 1) < 1000
    assert num_passed == 17 < 1000 / AGEING / 100


def test_little_left_counts_and_not_what_the_prompt_was() -> None:
    drive = roomy("srf", token_budget=100)
    prefill(drive, "long", 1000)
    for _ in range(9):
        step(drive)
    prefill(drive, "short", 90)
    assert step(drive) == {"long": 100}


def test_a_hit_in_the_cache_makes_a_prompt_short() -> None:
    drive = Drive.build(
        num_blocks=200, block_size=4, token_budget=20, prefix_caching=True, prefill_policy="srf"
    )
    first = drive.submit(make_request("first", prompt_len=80, max_tokens=1))
    while first.status is not Status.ENDED:
        drive.step()
    busy = drive.submit(make_request("busy", prompt=tuple(range(500, 600)), max_tokens=1))
    drive.step()
    drive.submit(make_request("again", prompt_len=82, max_tokens=1))
    assert step(drive) == {"again": 2, "busy": 18}
    drive.abort(busy)


def test_what_was_preempted_goes_before_all_that_is_new() -> None:
    drive = Drive.build(num_blocks=6, block_size=4, token_budget=16, prefill_policy="srf")
    old = drive.submit(make_request("old", prompt_len=8, max_tokens=12))
    young = drive.submit(make_request("young", prompt_len=7, max_tokens=12))
    while young.status is not Status.WAITING or not young.was_preempted:
        drive.step()
    drive.submit(make_request("new", prompt_len=1, max_tokens=1))
    while old.status is not Status.ENDED:
        assert "new" not in step(drive)
    assert step(drive) == {"young": young.num_tokens - 1, "new": 1}


arrivals = st.lists(
    st.tuples(st.integers(0, 3), st.sampled_from((1, 2, 5, 20, 60, 150)), st.integers(0, 40)),
    min_size=2,
    max_size=40,
)


@settings(max_examples=60, deadline=None)
@given(arrivals=arrivals, token_budget=st.integers(2, 60))
def test_waiting_is_bounded(arrivals: list[tuple[int, int, int]], token_budget: int) -> None:
    """A prompt of r tokens waits for what was there before it, and for fewer than r / AGEING
    tokens of what came later; then it is computed. No load of younger ones can change that."""
    drive = roomy("srf", token_budget=token_budget, num_blocks=3000)
    computed_before: dict[Sequence, dict[Sequence, int]] = {}
    unfinished: list[Sequence] = []

    def one_step() -> None:
        done = drive.step()
        over = {d.seq for d in done if d.seq.status is Status.HELD}
        for waiting in set(unfinished) - over:
            for d in done:
                tokens = computed_before[waiting]
                tokens[d.seq] = tokens.get(d.seq, 0) + d.num_tokens
        for seq in over:
            unfinished.remove(seq)
            drive.abort(seq)

    for index, (num_steps, size, extra) in enumerate(arrivals):
        for _ in range(num_steps):
            one_step()
        seq = prefill(drive, str(index), size + extra)
        unfinished.append(seq)
        computed_before[seq] = {}
    while unfinished:
        one_step()
    for seq, tokens in computed_before.items():
        passed = sum(n for other, n in tokens.items() if other.arrival > seq.arrival)
        assert passed < seq.num_prompt_tokens / AGEING
        older = sum(n for other, n in tokens.items() if other.arrival < seq.arrival)
        there = sum(s.num_prompt_tokens for s in computed_before if s.arrival < seq.arrival)
        assert older <= there
