"""Compiled kernels on disk: those of versions that are gone do not pile up."""

import os
import threading
import time
from pathlib import Path

import pytest

pytest.importorskip("numba")

from engine.cpu import jit
from engine.cpu.compiled import remove_old
from engine.cpu.jit import compiling

DAY_S = 24 * 3600


def test_old_versions_go_but_for_the_newest(tmp_path: Path) -> None:
    ages = {"now": 0.0, "today": 0.5, "tuesday": 2.0, "monday": 3.0, "may": 200.0, "june": 170.0}
    for name, days in ages.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "kernel.nbc").write_bytes(b"code")
        used = time.time() - days * DAY_S
        os.utime(tmp_path / name, (used, used))
    remove_old(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"now", "today", "tuesday", "monday"}


def test_versions_in_use_stay_however_many(tmp_path: Path) -> None:
    for index in range(9):
        (tmp_path / str(index)).mkdir()
    remove_old(tmp_path)
    assert len([*tmp_path.iterdir()]) == 9
    remove_old(tmp_path / "missing")


def test_one_at_a_time_compiles_and_later_nobody_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jit, "done_file", lambda what: tmp_path / f"{what}.done")
    monkeypatch.setattr(jit, "_CACHE", True)
    pause, order = threading.Event(), []

    def second() -> None:
        with compiling("x"):
            order.append("second")

    thread = threading.Thread(target=second)
    with compiling("x"):
        thread.start()
        pause.wait(0.1)  # nobody sets it: time for the other to come in, if it could
        order.append("first")
    thread.join(10)
    assert order == ["first", "second"]
    with compiling("x"), compiling("x"):  # would wait for itself
        order.append("at once")
    assert order[-1] == "at once"


def test_what_failed_to_compile_is_not_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jit, "done_file", lambda what: tmp_path / f"{what}.done")
    monkeypatch.setattr(jit, "_CACHE", True)
    with pytest.raises(ValueError, match="broken"), compiling("x"):
        raise ValueError("broken")
    assert not [*tmp_path.glob("*.done")]
