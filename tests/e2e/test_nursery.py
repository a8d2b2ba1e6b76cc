"""What is forked is told of as a process of ours would be."""

import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.e2e.nursery import nursery

WAIT_S = 10.0


def test_an_end_of_its_own_and_its_last_words(tmp_path: Path) -> None:
    log = tmp_path / "log"
    for _ in range(2):  # both in one log
        one = nursery().start(["router", "--no-such-flag"], log)
        assert one.wait(WAIT_S) == one.wait(0.0) == one.poll() == 2
    assert log.read_text().count("error: ") == 2
    one.terminate()  # nobody
    nobody = nursery().start(["deploy.worker", "--role", "decode"], log)
    assert nobody.wait(WAIT_S) == 2


def test_signals_reach_it(tmp_path: Path, tiny_llama: Path) -> None:
    argv = ["router", "--decode", "127.0.0.1:9", "--model-path", str(tiny_llama)]
    one = nursery().start(
        [*argv, "--served-model-name", "x", "--mode", "colocated"], tmp_path / "x"
    )
    one.send_signal(signal.SIGSTOP)
    began = time.monotonic()
    with pytest.raises(subprocess.TimeoutExpired):
        one.wait(0.2)
    assert 0.2 <= time.monotonic() - began < WAIT_S
    assert one.poll() is None
    one.kill()
    assert one.wait(WAIT_S) == -signal.SIGKILL
