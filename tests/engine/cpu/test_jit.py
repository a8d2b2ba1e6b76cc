"""Compiled kernels on disk: those of versions that are gone do not pile up."""

import os
import time
from pathlib import Path

import pytest

pytest.importorskip("numba")

from engine.cpu.jit import remove_old

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
