"""How much of a prompt a step computes beside running streams, under an objective and without."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.request import Leg
from engine.sequence import Sequence
from engine.step_budget import TILE_TOKENS, StepBudget, StepPace
from engine.step_cost import StepCost, StepWork, sequence_work
from tests.engine.known_cost import make_known
from tests.engine.requests import make_request
from tests.engine.scheduler_drive import Drive

PER_STEP, PER_DECODE, PER_TOKEN, PER_PAIR = 0.010, 0.002, 0.001, 1e-6


def known_cost() -> StepCost:
    return make_known(StepCost(), [PER_STEP, PER_DECODE, 0.0, PER_TOKEN, PER_PAIR])


def decode(context: int = 10, leg: Leg = Leg.LOCAL) -> Sequence:
    seq = Sequence(make_request(prompt_len=context, leg=leg), 0, 1000)
    seq.num_computed_tokens = context - 1
    return seq


def test_without_an_objective_the_tokens_are_the_budget() -> None:
    budget = StepPace(known_cost()).budget(100, [decode()])
    assert (budget.grant(0, 70), budget.grant(0, 70), budget.grant(0, 70)) == (70, 30, 0)


def test_without_running_decodes_the_budget_is_whole() -> None:
    pace = StepPace(known_cost(), tpot_slo_s=0.02)
    assert pace.budget(500, []).grant(0, 2048) == 500
    assert pace.budget(499, [decode(leg=Leg.PREFILL)]).grant(0, 2048) == 499


def test_beside_decodes_the_step_ends_in_time_and_on_a_tile() -> None:
    budget = StepPace(known_cost(), tpot_slo_s=0.212).budget(2048, [decode()])
    granted = budget.grant(1000, 2048)  # 0.2 s for tokens at (1 + 1 + n / 2000) ms
    assert granted == 96
    assert budget.grant(0, 2048) == 0  # what was too small for one is nobody's


def test_a_whole_prompt_in_time_leaves_the_rest_to_the_next() -> None:
    budget = StepPace(known_cost(), tpot_slo_s=0.132).budget(2048, [decode()])
    assert budget.grant(0, 40) == 40
    assert budget.grant(0, 10) == 10
    assert budget.grant(0, 1000) == 112 - 50  # 120 ms hold 119 tokens; whole tiles in all


def test_an_objective_out_of_reach_or_unknown_costs_still_let_a_tile_through() -> None:
    hopeless = StepPace(known_cost(), tpot_slo_s=0.001).budget(2048, [decode()])
    assert [hopeless.grant(0, 500), hopeless.grant(0, 500)] == [TILE_TOKENS, 0]
    unknown = StepPace(StepCost(), tpot_slo_s=10.0).budget(2048, [decode()])
    assert unknown.grant(0, 500) == TILE_TOKENS


@settings(max_examples=300, deadline=None)
@given(
    weights=st.lists(st.floats(0, 0.01), min_size=5, max_size=5),
    seconds=st.floats(-1, 5),
    max_tokens=st.integers(0, 3000),
    wanted=st.lists(st.tuples(st.integers(0, 5000), st.integers(1, 4000)), min_size=1, max_size=5),
)
def test_never_over_time_or_tokens_but_for_the_first_tile(
    weights: list[float], seconds: float, max_tokens: int, wanted: list[tuple[int, int]]
) -> None:
    cost = StepCost()
    cost.weights[:] = weights
    budget = StepBudget(max_tokens, cost, seconds)
    work, total = StepWork(), 0
    for first, num_tokens in wanted:
        granted = budget.grant(first, num_tokens)
        assert 0 <= granted <= num_tokens
        if granted > 1:  # one token is reckoned as a decode
            work = work.plus(sequence_work(first, granted))
        total += granted
    assert total <= max_tokens
    assert total > 0 or not max_tokens
    assert total <= TILE_TOKENS or cost.predict(work) <= seconds * (1 + 1e-9) + 1e-9


def learn(drive: Drive) -> None:
    """As an engine would, of a machine on which a token costs 1 ms and a step 10."""
    drive.scheduler.cost.learn(drive.work, 0.01 + 0.001 * sum(drive.work[1::2]))


def test_a_long_prompt_does_not_stall_running_streams() -> None:
    """Whatever the machine's speed is, found out on the way."""
    drive = Drive.build(
        num_blocks=1000, block_size=16, token_budget=512, max_model_len=4096, tpot_slo_s=0.1
    )
    streams = [drive.submit(make_request(str(i), prompt_len=64, max_tokens=900)) for i in range(4)]
    for _ in range(20):
        drive.step()
        learn(drive)
    long = drive.submit(make_request("long", prompt_len=2048, max_tokens=1))
    sizes = []
    while not long.num_output_tokens:
        before = [seq.num_tokens for seq in streams]
        computed = {done.seq: done.num_tokens for done in drive.step()}
        assert [seq.num_tokens for seq in streams] == [count + 1 for count in before]
        sizes.append(computed[long])
        learn(drive)
    # 100 ms hold 86 prompt tokens beside four decodes.
    assert set(sizes[6:-1]) == {80}
    assert max(sizes) <= 96
    for seq in streams:
        drive.abort(seq)
    next_long = drive.submit(make_request("next", prompt_len=2048, max_tokens=1))
    assert [done.num_tokens for done in drive.step()] == [512]
    drive.abort(next_long)


@pytest.mark.parametrize("tpot_slo_s", [None, 0.1])
def test_short_prompts_share_a_step(tpot_slo_s: float | None) -> None:
    drive = Drive.build(num_blocks=64, block_size=16, token_budget=256, tpot_slo_s=tpot_slo_s)
    for i in range(6):
        drive.submit(make_request(str(i), prompt_len=40 + i, max_tokens=1, leg=Leg.PREFILL))
    assert [done.num_tokens for done in drive.step()] == [40, 41, 42, 43, 44, 45]
