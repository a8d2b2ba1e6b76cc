"""The simulated cluster does what a pencil does; prediction damps what the naive rule swings."""

import json
import statistics
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from bench.rejection import main
from bench.rejection_sim import RULES, Plant, Simulation
from bench.traces import Arrival

PLANT = Plant(
    num_prefills=1,
    num_decodes=1,
    tokens_per_s=100.0,
    step_s=0.0,
    stream_s=0.01,
    slo_ttft_s=10.0,
    slo_tpot_s=0.02,
)


def test_two_streams_share_the_steps() -> None:
    """One begins at 1 s; the second at 2 s, when the first has had its 100 tokens; both then run
    at 20 ms a token."""
    trace = [Arrival(0, 100, 150, (1,)), Arrival(0, 100, 100, (2,))]
    outcome = Simulation(PLANT, RULES["no early rejection"]).run(trace, 1.0)
    assert (outcome.num_done, outcome.num_early, outcome.num_slow) == (2, 0, 0)


def test_what_comes_too_late_is_slow_or_dropped() -> None:
    trace = [Arrival(0, 100, 1000, (index,)) for index in range(3)]
    outcome = Simulation(PLANT, RULES["no early rejection"]).run(trace, 1.0)
    assert (outcome.num_done, outcome.num_slow) == (3, 3)
    strict = replace(PLANT, drops_late=True)
    outcome = Simulation(strict, RULES["no early rejection"]).run(trace, 1.0)
    assert (outcome.num_done, outcome.num_late, outcome.lost_tokens) == (2, 1, 100)
    # Nothing runs yet while it is decided: who looks at that lets all three in.
    assert Simulation(PLANT, RULES["early, load now"]).run(trace, 1.0).num_early == 0
    assert Simulation(PLANT, RULES["early, predicted"]).run(trace, 1.0).num_early == 1


def waves(seed: int) -> list[Arrival]:
    """Twice what decode can do, prompts of very different length."""
    draw, at_s, found = Random(seed), 0.0, []
    for index in range(4000):
        at_s += draw.expovariate(8.0)
        prompt = int(draw.lognormvariate(8.5, 1.0)) + 1
        found.append(Arrival(at_s, prompt, int(draw.expovariate(1 / 350)) + 1, (index,)))
    return found


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_prediction_damps_the_swing_and_keeps_the_objective(seed: int) -> None:
    plant = Plant(80, 1, 2000.0, 0.01, 0.00025, 60.0, 0.025)
    trace = waves(seed)
    done = {name: Simulation(plant, rule).run(trace, 1.0) for name, rule in RULES.items()}
    naive, predicted = done["early, load now"], done["early, predicted"]
    swings = [statistics.pstdev(one.decode_loads[120:]) for one in (naive, predicted)]
    assert swings[1] <= 0.8 * swings[0]
    within = [one.num_done - one.num_slow for one in (naive, predicted)]
    assert within[1] > within[0]


def test_the_command_prints_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "lengths.csv"
    rows = "\n".join(f"{1000 + i % 7},{50 + i % 5}" for i in range(2000))
    trace.write_text(f"num_prefill_tokens,num_decode_tokens\n{rows}\n")
    main([str(trace), "--plot", str(tmp_path / "out.svg"), "--plot-s", "60"])
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert told["early, predicted"]["within"] > 0
    assert (tmp_path / "out.svg").read_text().count("<polyline") == 6
