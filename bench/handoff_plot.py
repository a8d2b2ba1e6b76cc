"""Draws the handoff by prompt length: `python -m bench.handoff_plot OUT.svg LINES.jsonl...`.

Out of the JSON lines of `bench.handoff` and `bench.handoff_kv`, a panel each: the full transfer,
what its stages took, and the exposed handoff; milliseconds over tokens, both logarithmic.
"""

import argparse
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

WIDTH, HEIGHT, PANELS_A_ROW = 420, 320, 2
LEFT, RIGHT, TOP, BOTTOM = 52, 92, 40, 40  # margins of a panel; curves are named on the right

Curves = Mapping[str, tuple[str, Callable[[dict[str, Any]], float]]]
"""Color and value of each, by name."""

CURVES: Curves = {
    "full transfer": ("#222222", lambda row: row["full_transfer_ms"]),
    "pack": ("#1b7837", lambda row: row["stages_ms"]["pack"]),
    "ship": ("#2166ac", lambda row: row["stages_ms"]["ship"]),
    "install": ("#b35806", lambda row: row["stages_ms"]["install"]),
    "exposed": ("#c51b7d", lambda row: row["exposed_ms"]["p50"]),
}


class Scale:
    """A logarithmic axis, from pixel `at` on."""

    def __init__(self, values: Iterable[float], at: float, length: float) -> None:
        logs = [math.log10(value) for value in values]
        self._low, self._at, self._length = min(logs), at, length
        self._span = (max(logs) - self._low) or 1.0

    def __call__(self, value: float) -> float:
        return self._at + self._length * (math.log10(value) - self._low) / self._span

    def decades(self) -> list[float]:
        end = math.floor(self._low + self._span + 1e-9)
        return [10.0**power for power in range(math.ceil(self._low - 1e-9), end + 1)]


def panel(
    title: str, rows: Sequence[dict[str, Any]], left: int, top: int, curves: Curves = CURVES
) -> list[str]:
    ms = [max(value(row), 0.01) for _, value in curves.values() for row in rows]
    tokens = [row["tokens"] for row in rows]
    bottom, right = top + HEIGHT - BOTTOM, left + WIDTH - RIGHT
    x = Scale(tokens, left + LEFT, WIDTH - LEFT - RIGHT)
    y = Scale([min(ms) * 0.8, max(ms) * 1.2], bottom, TOP + BOTTOM - HEIGHT)
    drawn = [_text(left + LEFT, top + 24, title, size=13)]
    drawn += [_text(x(n), bottom + 16, f"{n:,}", anchor="middle") for n in tokens]
    drawn.append(_text((left + LEFT + right) / 2, bottom + 32, "prompt tokens", anchor="middle"))
    for value in y.decades():
        drawn.append(_line(left + LEFT, y(value), right, y(value), "#dddddd"))
        drawn.append(_text(left + LEFT - 6, y(value) + 4, f"{value:g} ms", anchor="end"))
    ends = []
    for name, (color, of) in curves.items():
        points = [(x(row["tokens"]), y(max(of(row), 0.01))) for row in rows]
        path = " ".join(f"{a:.1f},{b:.1f}" for a, b in points)
        drawn.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"/>')
        ends.append((points[-1][1], name, color))
    return drawn + _names(ends, right + 6)


def _names(ends: list[tuple[float, str, str]], left: float) -> list[str]:
    """Beside the ends of the curves, none upon another."""
    drawn, last = [], -math.inf
    for at, name, color in sorted(ends):
        last = max(at + 4, last + 13)
        drawn.append(_text(left, last, name, color=color))
    return drawn


def _text(
    x: float, y: float, text: str, *, size: int = 11, anchor: str = "start", color: str = "#222222"
) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" fill="{color}"'
    return f"<text {place}>{text}</text>"


def _line(x1: float, y1: float, x2: float, y2: float, color: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{color}"/>'


def title_of(told: dict[str, Any]) -> str:
    if told["bench"] == "handoff":
        return "SmolLM2-135M, two workers, shared memory"
    link = f"{told['link_gbit']:g} Gbit/s" if told["link_gbit"] else "shared memory"
    return f"KV of an 8B model's shape, {link}"


def draw(lines: Sequence[dict[str, Any]]) -> str:
    """An SVG of one panel a line."""

    def one(told: dict[str, Any]) -> Panel:
        rows = sorted(told["rows"], key=lambda row: row["tokens"])
        return lambda left, top: panel(title_of(told), rows, left, top)

    return document([one(told) for told in lines])


Panel = Callable[[int, int], list[str]]
"""What is drawn, from a left and a top on."""


def document(panels: Sequence[Panel]) -> str:
    """An SVG."""
    drawn = []
    for i, panel_at in enumerate(panels):
        row, column = divmod(i, PANELS_A_ROW)
        drawn += panel_at(column * WIDTH, row * HEIGHT)
    width, height = WIDTH * PANELS_A_ROW, HEIGHT * math.ceil(len(panels) / PANELS_A_ROW)
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif">'
    return "\n".join((head, '<rect width="100%" height="100%" fill="white"/>', *drawn, "</svg>\n"))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.handoff_plot", description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("lines", type=Path, nargs="+")
    args = parser.parse_args()
    lines = [json.loads(line) for path in args.lines for line in path.read_text().splitlines()]
    args.out.write_text(draw([told for told in lines if told.get("rows")]))


if __name__ == "__main__":
    main()
