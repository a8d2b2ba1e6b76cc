"""What early rejection does, on a trace in virtual time: too late, by the load now, by prediction.

    python -m bench.rejection TRACE [--scale 3] [--prefills 10] [--decodes 2] [--plot OUT.svg]

Printed per rule: requests refused at once, and (with --drop-late) dropped at decode after their
prompts were computed; those that missed the objective on TPOT, and those within it; and how much
the load of decode swings (standard deviation, of what the objective
allows; and the mean change from one half minute to the next). The last line is JSON.
"""

import argparse
import json
import statistics
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from bench.rejection_sim import RULES, Outcome, Plant, Simulation
from bench.traces import read

WARM_S = 120
"""At the beginning the cluster is empty, whatever the rule."""
HALF_MINUTE = 30

WIDTH, HEIGHT, LEFT, TOP = 760, 130, 46, 26
COLORS = {"decode": "#2166ac", "prefill": "#b35806"}


def told(outcome: Outcome) -> dict[str, float]:
    loads = outcome.decode_loads[WARM_S:]
    starts = range(0, len(loads), HALF_MINUTE)
    means = [statistics.fmean(loads[start : start + HALF_MINUTE]) for start in starts]
    swings = [abs(after - before) for before, after in pairwise(means)]
    return {
        "refused": outcome.num_early,
        "dropped": outcome.num_late,
        "too_slow": outcome.num_slow,
        "within": outcome.num_done - outcome.num_slow,
        "lost_mtokens": round(outcome.lost_tokens / 1e6, 2),
        "decode_load": round(statistics.fmean(loads), 3),
        "deviation": round(statistics.pstdev(loads), 3),
        "swing": round(statistics.fmean(swings), 3) if swings else 0.0,
    }


def draw(outcomes: dict[str, Outcome], plant: Plant, seconds: int) -> str:
    """An SVG, a panel for each rule: load of decode, and queue of prefill by its objective."""
    height = (HEIGHT + TOP) * len(outcomes) + 30
    drawn = []
    for row, (name, outcome) in enumerate(outcomes.items()):
        top = TOP + row * (HEIGHT + TOP)
        loads = {
            "decode": outcome.decode_loads[WARM_S : WARM_S + seconds],
            "prefill": [
                one / plant.slo_ttft_s for one in outcome.prefill_loads[WARM_S : WARM_S + seconds]
            ],
        }
        drawn.append(_text(LEFT, top - 8, name))
        for value in (0.0, 0.5, 1.0):
            y = top + HEIGHT * (1 - value / 1.2)
            drawn.append(
                f'<line x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - 10}" y2="{y:.1f}" stroke="#ddd"/>'
            )
            drawn.append(_text(6, y + 4, f"{value:.1f}"))
        for kind, values in loads.items():
            step = (WIDTH - LEFT - 10) / max(1, len(values) - 1)
            points = " ".join(
                f"{LEFT + i * step:.1f},{top + HEIGHT * (1 - min(value, 1.2) / 1.2):.1f}"
                for i, value in enumerate(values)
            )
            drawn.append(
                f'<polyline points="{points}" fill="none" stroke="{COLORS[kind]}" '
                'stroke-width="1.3"/>'
            )
    text = f"{seconds} s; load by what the objective allows: decode (blue), prefill queue (brown)"
    drawn.append(_text(LEFT, height - 8, text))
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}"'
    return "\n".join([f'{head} font-family="sans-serif" font-size="11">', *drawn, "</svg>", ""])


def _text(x: float, y: float, text: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="#222">{text}</text>'


def main(argv: Sequence[str] | None = None) -> None:
    options = _options(argv)
    plant = Plant(
        options.prefills,
        options.decodes,
        options.tokens_per_s,
        options.step_ms / 1000,
        options.stream_ms / 1000,
        options.slo_ttft_s,
        options.slo_tpot_ms / 1000,
        options.drop_late,
    )
    trace = read(Path(options.trace), max_requests=options.requests, rate=options.rate)
    span_s = trace[-1].at_s / options.scale
    print(f"{len(trace)} requests in {span_s:.0f} s; {plant}")
    outcomes = {
        name: Simulation(plant, rule).run(trace, options.scale) for name, rule in RULES.items()
    }
    rows = {name: told(outcome) for name, outcome in outcomes.items()}
    for name, row in rows.items():
        print(f"{name:18}", "  ".join(f"{key} {value:g}" for key, value in row.items()))
    if options.plot:
        Path(options.plot).write_text(draw(outcomes, plant, options.plot_s), encoding="utf-8")
    print(json.dumps({"trace": Path(options.trace).name, "scale": options.scale, **rows}))


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.rejection", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("trace")
    parser.add_argument("--scale", type=float, default=3.0, help="times the trace's rate")
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument("--rate", type=float, default=5.0, help="where the trace has no times")
    parser.add_argument("--prefills", type=int, default=10)
    parser.add_argument("--decodes", type=int, default=2)
    parser.add_argument("--tokens-per-s", type=float, default=16000)
    parser.add_argument("--step-ms", type=float, default=20.0)
    parser.add_argument("--stream-ms", type=float, default=1.0, help="of a step, by each stream")
    parser.add_argument("--slo-ttft-s", type=float, default=30.0)
    parser.add_argument("--slo-tpot-ms", type=float, default=100.0)
    parser.add_argument("--drop-late", action="store_true", help="check again at decode")
    parser.add_argument("--plot", default="")
    parser.add_argument("--plot-s", type=int, default=600)
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
