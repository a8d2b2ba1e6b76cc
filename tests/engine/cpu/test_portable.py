"""CPUs without AVX512 run the same kernels, lowered by LLVM, on instructions that they have."""

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("numba")

ROOT = Path(__file__).parents[3]


@pytest.mark.skipif(platform.machine() != "x86_64", reason="names a CPU of that family")
def test_an_older_cpu_computes_the_same(tmp_path: Path) -> None:
    environ = {
        **os.environ,
        "NUMBA_CPU_NAME": "x86-64-v3",
        "NUMBA_CPU_FEATURES": "+avx2,+fma,+f16c,+bmi,+bmi2",
        "BATON_CACHE": str(tmp_path),
        "PYTHONPATH": str(ROOT),
    }
    command = [sys.executable, "-m", "tests.engine.cpu.portable_kernels"]
    run = subprocess.run(
        command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=120, check=False
    )
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    assert found["product"] < 2e-5
    assert found["exp"] < 4e-7
    assert found["exp2"] < 4e-7
    assert found["zeros"] == [0, 0, 0, 1] * 2
