"""What a run of `baton bench` looked like, as one PNG: TTFT, TPOT and ITL by percentile, and the
stages of a request (matplotlib, of the extra `bench`)."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.load import Run
from bench.serving import Numbers

_INK, _MUTED = "#0f766e", "#94a3b8"


def draw(path: Path, run: Run, stages: Numbers) -> None:
    """Raises OSError."""
    answered = [record for record in run.records if record.is_ok]
    figure = Figure(figsize=(10, 6), layout="constrained")
    (first, second), (third, fourth) = figure.subplots(2, 2)
    _percentiles(first, "TTFT", [1e3 * record.ttft_s for record in answered])
    _percentiles(second, "TPOT", [1e3 * tpot for r in answered if (tpot := r.tpot_s) is not None])
    _percentiles(third, "ITL", [1e3 * gap for record in answered for gap in record.itl_s])
    _bars(fourth, stages)
    figure.savefig(path, format="png", dpi=120)


def _percentiles(axes: Axes, title: str, values: list[float]) -> None:
    """How many per cent are at most so long."""
    ordered = sorted(values)
    axes.set(title=f"{title} ({len(ordered)})", xlabel="ms", ylabel="per cent", ylim=(0, 101))
    axes.grid(color=_MUTED, alpha=0.3)
    if ordered:
        shares = [100 * (index + 1) / len(ordered) for index in range(len(ordered))]
        axes.step(ordered, shares, where="post", color=_INK)
        axes.set_xlim(left=0)


def _bars(axes: Axes, stages: Numbers) -> None:
    """Means, in the order in which a request goes through them."""
    names = list(stages)[::-1]
    axes.set(title="Where the first byte's time goes, mean", xlabel="ms")
    bars = axes.barh(names, [stages[name] for name in names], color=_INK)
    axes.bar_label(bars, fmt="%.1f", padding=3, color=_MUTED)
    axes.margins(x=0.12)
