"""What a thread is taken away with, another does; it counts once, and a late one does no harm."""

import threading
from functools import partial

import numpy as np
import pytest
import torch

pytest.importorskip("numba")

from engine.cpu.jit import kernel
from engine.cpu.layout import Ints
from engine.cpu.model import PanelModel
from engine.cpu.sync import claim, commit, complete, load_acquire, new_counters
from engine.cpu.team import Team
from engine.cpu.tile import PANEL, TILE
from tests.engine.conftest import TinyModel
from tests.engine.cpu.test_panel_model import load, ragged_step


@kernel
def _add_ten_times(
    counters: Ints, thread: int, slow: int, gate: Ints, source: Ints, total: Ints
) -> None:
    """total += 10 * source; the thread `slow` begins its first item, and waits for the gate."""
    item = claim(counters, 0, thread, len(total))
    while item >= 0:
        if thread == slow:
            gate[1] = 1
            while load_acquire(gate, 0) == 0:
                pass
        own = 0
        for _ in range(10):
            own += source[item]
        if commit(counters, thread):
            total[item] += own
            complete(counters, 0)
        item = claim(counters, 0, thread, len(total))


@kernel
def _is_at_gate(gate: Ints) -> bool:
    arrived: bool = load_acquire(gate, 1) == 1
    return arrived


@kernel
def _count_uneven(counters: Ints, thread: int, work: Ints, done: Ints, sink: Ints) -> None:
    item = claim(counters, 0, thread, len(done))
    while item >= 0:
        for _ in range(work[item]):
            sink[thread * 8] = load_acquire(sink, thread * 8) + 1
        if commit(counters, thread):
            done[item] += 1
            complete(counters, 0)
        item = claim(counters, 0, thread, len(done))


def test_an_item_in_the_hands_of_a_stopped_thread_is_done_by_another() -> None:
    counters, gate = new_counters(1, 3), np.ones(2, dtype=np.int64)
    source, total = np.arange(20), np.zeros(20, dtype=np.int64)
    held = {claim(counters, 0, thread, 20) for thread in (1, 2)}
    assert len(held) == 2
    assert min(held) >= 0
    _add_ten_times(counters, 0, -1, gate, source, total)
    assert (total == 10 * source).all()
    assert not commit(counters, 1)
    assert not commit(counters, 2)
    assert claim(counters, 0, 1, 20) == -1


def test_who_comes_late_changes_nothing_whatever_it_reads_by_then() -> None:
    counters, gate = new_counters(1, 2), np.zeros(2, dtype=np.int64)
    source, total = np.arange(1, 9), np.zeros(8, dtype=np.int64)
    _is_at_gate(gate)
    late = threading.Thread(target=_add_ten_times, args=(counters, 1, 1, gate, source, total))
    _add_ten_times(new_counters(1, 1), 0, -1, gate, source, total.copy())  # compiled
    late.start()
    while not _is_at_gate(gate):
        pass
    _add_ten_times(counters, 0, -1, gate, source, total)
    expected = 10 * source
    assert (total == expected).all()
    source[:] = 1000  # the next region has it
    gate[0] = 1
    late.join(10)
    assert not late.is_alive()
    assert (total == expected).all()


def test_items_of_any_length_count_once() -> None:
    team, rng = Team(4), np.random.default_rng(1)
    for round_ in range(40):
        items = int(rng.integers(1, 60))
        work = rng.choice([1, 100, 50_000], size=items, p=[0.5, 0.4, 0.1])
        counters, done = new_counters(1, 4), np.zeros(items, dtype=np.int64)
        sink = np.zeros(32, dtype=np.int64)

        def share(counters: Ints, work: Ints, done: Ints, sink: Ints, thread: int) -> None:
            _count_uneven(counters, thread, work, done, sink)

        team.run(partial(share, counters, work, done, sink))
        assert (done == 1).all(), (round_, done)
    team.close()


@pytest.mark.parametrize("spans", [[(70, 1), (3, 1)], [(0, 64), (70, 1), (3, 1)]])
def test_a_step_with_threads_stopped_in_its_regions_is_the_same_bits(
    wide_llama: TinyModel, spans: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(wide_llama, num_threads=6)
    order = list(range(len(spans)))
    expected = ragged_step(model, spans, order)
    stopped: list[tuple[Ints, int]] = []

    def run_with_stopped(job: "partial[None]") -> None:
        counters = job.args[0]
        for thread, (region, items) in enumerate(_helped_regions(model, spans), start=1):
            assert claim(counters, region, thread, items) >= 0
            stopped.append((counters, thread))
        job(0)

    with monkeypatch.context() as patch:
        patch.setattr(model._team, "run", run_with_stopped)
        logits = ragged_step(model, spans, order)
    for a, b in zip(logits, expected, strict=True):
        assert torch.equal(a, b)
    assert len(stopped) == 5
    assert not any(commit(counters, thread) for counters, thread in stopped)
    model.close()


def _helped_regions(model: PanelModel, spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The first layer's, and how many items each has."""
    config, news = model.config, [new for _, new in spans]
    width, kv_width = (n * config.head_dim for n in (config.num_heads, config.num_kv_heads))
    per_kv = config.num_heads // config.num_kv_heads
    tiles = sum(1 if new == 1 else -(-new * per_kv // TILE) for new in news)
    outs = (width + 2 * kv_width, config.hidden_size, 2 * config.intermediate_size)
    qkv, hidden, inner = (-(-num_out // PANEL) for num_out in outs)
    attend = tiles * config.num_kv_heads
    return [(2, qkv), (5, attend), (6, hidden), (8, inner), (9, hidden)]
