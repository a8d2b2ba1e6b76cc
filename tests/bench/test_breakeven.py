"""The arithmetic of the break-even benchmark, its plot, and the scaled replay of a trace."""

from argparse import Namespace
from xml.etree import ElementTree

import pytest

from bench.breakeven import Measured, Setting, line, regret, row, summary, told_as
from bench.breakeven_plot import draw, rows_of
from bench.replay_live import Answer, ceiling, report, scaled, token_ids
from bench.traces import Arrival


def found(local: list[float], remote: list[float], auto: list[float]) -> dict[str, Measured]:
    each = {"local": local, "remote": remote, "auto": auto}
    return {way: Measured(ms, ms, num_local=1, num_requests=4) for way, ms in each.items()}


def test_regret_is_what_the_better_way_would_have_saved() -> None:
    assert regret(10.0, 20.0, 11.0) == pytest.approx(0.1)
    assert regret(20.0, 10.0, 9.0) == 0.0  # a mix may be better than both
    told = row(Setting(64, 4, 8, 8), found([9, 10, 90], [20, 21, 22], [12, 12, 500]))
    assert told["answer_ms"] == {"local": 10, "remote": 21, "auto": 12}
    assert (told["regret"], told["local_share"]) == (0.2, 0.25)
    good = row(Setting(128, 4, 8, 8), found([10, 10, 10], [20, 20, 20], [10, 10, 10]))
    assert summary([told, good]) == {"mean_regret": 0.1, "worst_regret": 0.2, "met": False}
    assert summary([good])["met"]


def test_each_point_is_told_by_itself_and_drawn() -> None:
    args = Namespace(output_len=8, rounds=1, waves=2)
    rows = [row(Setting(tokens, 1, 8, 8), found([1], [2], [1])) for tokens in (32, 64)]
    points = [f"{line(one)}\n{told_as(args, rows=[one])}" for one in rows]
    assert rows_of("\n".join([*points, told_as(args, **summary(rows))])) == rows
    assert rows_of(points[0]) == rows[:1]  # and the run was cut off


def test_the_plot_has_a_panel_for_each_load() -> None:
    rows = [
        row(Setting(tokens, load, 8, 8), found([tokens], [2 * tokens], [tokens]))
        for load in (1, 4)
        for tokens in (512, 64)
    ]
    svg = draw(rows)
    root = ElementTree.fromstring(svg)
    lines = [one for one in root if one.tag.endswith("polyline")]
    assert len(lines) == 6
    assert "one request at a time" in svg
    assert "4 requests at once" in svg


def test_a_scaled_prompt_shares_what_the_trace_shares() -> None:
    first = scaled(Arrival(0.0, 1500, 64, (1, 2, 3)), 16, 32, 2000)
    second = scaled(Arrival(1.0, 2048, 10, (1, 2, 7, 8)), 16, 32, 2000)
    assert (first.num_tokens, first.num_outputs, second.num_outputs) == (46, 2, 2)
    one, other = token_ids(first, 16), token_ids(second, 16)
    assert (len(one), len(other)) == (46, 64)
    assert one[:32] == other[:32]
    assert one[32:] != other[32:46]
    assert ceiling([first, second], 16) == pytest.approx(32 / 110)
    assert len(token_ids(scaled(first, 16, 1, 1), 16)) == 1


def test_the_report_of_a_replay() -> None:
    answers = [Answer(0.1, 0.01, 100, 50), Answer(0.3, 0.03, 100, 0)]
    told = report(answers, ["it broke"])
    assert (told["answered"], told["failed"], told["hit_rate"]) == (2, 1, 0.25)
    assert told["mean_ttft_s"] == told["p50_ttft_s"] == pytest.approx(0.2)
    assert told["mean_tpot_ms"] == pytest.approx(20)
    assert report([], ["it broke"]) == {"answered": 0, "failed": 1}
