"""`baton up` on a terminal: what it shows there, and Ctrl-C, which the terminal sends to all that
run in the foreground. What it starts are fakes."""

import json
from pathlib import Path

import pexpect
import psutil
import pytest

from tests.deploy.terminal import rest_of, terminal
from tests.deploy.test_up import ENVIRON, UP, is_gone, until
from tests.ports import free_port


def interrupt(child: "pexpect.spawn[str]") -> str:
    """Ctrl-C: it ends well, and so do all that it has started. What is shown meanwhile."""
    family = [one.pid for one in psutil.Process(child.pid).children(recursive=True)]
    assert len(family) == 3
    child.sendintr()
    shown, status = rest_of(child)
    assert status == 0
    assert "Traceback" not in shown
    assert "starting it again" not in shown, "Ctrl-C has reached what is to end in order"
    assert all(is_gone(pid) for pid in family)
    return shown


@pytest.mark.parametrize(("columns", "kind"), [(100, "xterm-256color"), (30, "dumb")])
def test_ready_and_ctrl_c(tmp_path: Path, columns: int, kind: str) -> None:
    flags = [f"--run-dir={tmp_path}", f"--port={free_port()}"]
    with terminal(
        *UP[1:], *flags, program=UP[:1], columns=columns, more=ENVIRON, TERM=kind
    ) as child:
        child.expect_exact("Ready: curl http://127.0.0.1:")
        before = child.before or ""
        ready = child.readline()
        assert json.loads(ready[ready.index("{") : ready.rindex("}") + 1]), "one line, to copy"
        assert len(json.loads((tmp_path / "cluster.json").read_text())) == 3
        after = interrupt(child)
    assert not (tmp_path / "cluster.json").exists()
    if kind == "dumb":
        assert "\x1b" not in before + ready + after
    else:
        assert "Starting prefill-0, decode-0, router" in before
        assert "Stopping" in after


def test_ctrl_c_in_the_middle_of_the_start(tmp_path: Path) -> None:
    flags = [f"--run-dir={tmp_path}", f"--port={free_port()}", "--decode-args=--fake 'never ready'"]
    with terminal(*UP[1:], *flags, program=UP[:1], more=ENVIRON, TERM="xterm") as child:
        child.expect("Starting prefill-0, decode-0, router")
        until(lambda: len(psutil.Process(child.pid).children()) == 3, 20)
        log = tmp_path / "decode-0.log"
        until(lambda: log.exists() and "fake worker" in log.read_text(), 20)
        interrupt(child)
    assert not (tmp_path / "cluster.json").exists()
