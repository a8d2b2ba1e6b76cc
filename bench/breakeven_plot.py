"""Draws the break-even by prompt length: `python -m bench.breakeven_plot OUT.svg LINES.jsonl...`.

Out of the JSON lines of `bench.breakeven`, a panel for each load: how long an answer takes when
prompts are always computed on decode, always handed over, and where the router chooses;
milliseconds over prompt tokens, both logarithmic.
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.handoff_plot import Curves, Panel, document, panel

Row = dict[str, Any]

CURVES: Curves = {
    "local": ("#b35806", lambda row: row["answer_ms"]["local"]),
    "remote": ("#2166ac", lambda row: row["answer_ms"]["remote"]),
    "auto": ("#222222", lambda row: row["answer_ms"]["auto"]),
}


def draw(rows: Sequence[Row]) -> str:
    """An SVG of one panel a load."""
    by_load: dict[int, list[Row]] = defaultdict(list)
    for row in sorted(rows, key=lambda one: (one["load"], one["tokens"])):
        by_load[row["load"]].append(row)

    def one(load: int, found: Sequence[Row]) -> Panel:
        title = f"{load} requests at once" if load > 1 else "one request at a time"
        return lambda left, top: panel(title, found, left, top, CURVES)

    return document([one(load, found) for load, found in by_load.items()])


def rows_of(text: str) -> list[Row]:
    """Of what `bench.breakeven` printed, or of the lines of JSON in it."""
    lines = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    return [row for told in lines for row in told.get("rows", ())]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.breakeven_plot", description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("lines", type=Path, nargs="+")
    args = parser.parse_args()
    args.out.write_text(draw(rows_of("\n".join(path.read_text() for path in args.lines))))


if __name__ == "__main__":
    main()
