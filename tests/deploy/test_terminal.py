"""Commands on a terminal without a cluster: Ctrl-C while they wait for a router that takes what
they ask and never answers, and what those say that ask nobody. Commands at work are in
tests/e2e/up, `baton up` is in test_up_terminal.py."""

import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from deploy.completion import SCRIPTS
from tests.deploy.terminal import BATON, rest_of, run, terminal

ASKS_A_ROUTER = ("status", "status --watch", "chat Hello", "bench", "conformance", "doctor")
ASKS_AN_OPERATOR_S_PORT = ("workers", "drain decode-0", "pin FILE")
ENDS_WELL = ("status --watch", "chat Hello")
"""Ctrl-C is how one ends these; the others say 130, as shells do."""
DOCTOR = "import sys; from deploy import doctor; doctor.LOOKS = doctor.LOOKS[-1:]; " \
    "sys.exit(doctor.main(sys.argv[2:]))"  # fmt: skip
"""Its last look only: the others take seconds."""


@pytest.fixture
def mute() -> Iterator[socket.socket]:
    """Listens, and says nothing to who comes."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listener:
        listener.settimeout(60)
        yield listener


def test_ctrl_c_while_a_router_does_not_answer(mute: socket.socket, tmp_path: Path) -> None:
    """They start side by side, and are all in the middle once the requests are here."""
    (tmp_path / "token").write_text("secret")
    (tmp_path / "prefix").write_text("Be brief.")
    url = f"http://127.0.0.1:{mute.getsockname()[1]}"
    admin = ["--admin", url, "--admin-token-file", str(tmp_path / "token")]
    with ExitStack() as stack:
        children = {}
        for words in (*ASKS_A_ROUTER, *ASKS_AN_OPERATOR_S_PORT):
            argv = words.replace("FILE", str(tmp_path / "prefix")).split()
            where = ["--url", url] if words in ASKS_A_ROUTER else admin
            program = ("-c", DOCTOR) if words == "doctor" else BATON
            children[words] = stack.enter_context(
                terminal(*argv, *where, program=program, columns=40, TERM="dumb")
            )
        for _ in children:
            connection, _ = mute.accept()
            connection.settimeout(60)
            stack.enter_context(connection)
            assert connection.recv(1), "it asks"
        for words, child in children.items():
            child.sendintr()
            shown, status = rest_of(child)
            assert status == (0 if words in ENDS_WELL else 130), (words, shown)
            assert "Traceback" not in shown, (words, shown)
            assert "\x1b" not in shown, (words, shown)


def test_what_asks_nobody_looks_the_same_on_every_terminal() -> None:
    shown, status = run("keys", "acme", "--priority", "2", columns=40)
    assert status == 0
    line, key = shown.splitlines()
    assert line.startswith("sha256:")
    assert line.endswith(" tenant=acme priority=2")
    assert key.startswith("baton-")
    shown, status = run("completion", "bash", columns=40)
    assert (shown, status) == (SCRIPTS["bash"], 0)
