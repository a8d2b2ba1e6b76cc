"""The words of the `baton` command."""

import os
import subprocess

import pytest

from deploy import cli


@pytest.mark.parametrize(
    ("argv", "program"),
    [
        (["router", "--port", "1"], ["-m", "router", "--port", "1"]),
        (["prefill", "--help"], ["-m", "deploy.worker", "--role", "prefill", "--help"]),
        (["decode"], ["-m", "deploy.worker", "--role", "decode"]),
        (["keys", "acme"], ["-m", "router.new_key", "acme"]),
        (["prepare", "--model", "x"], ["-m", "engine.prepare", "--model", "x"]),
        (
            ["decode", "--model=x", "--name", "d"],
            ["-m", "deploy.worker", "--role", "decode", "--model-path", "/x", "--name", "d"],
        ),
        (
            ["router", "--model", "x"],
            ["-m", "router", "--model-path", "/x", "--served-model-name", "an x"],
        ),
    ],
)
def test_one_process_is_another_program(
    argv: list[str], program: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Became(Exception):
        pass

    def become(path: str, arguments: list[str]) -> None:
        assert [path, *program] == arguments
        raise Became

    def prepare(argv: list[str], **_: object) -> subprocess.CompletedProcess[bytes]:
        assert argv[1:] == ["-m", "engine.prepare", "--model", "x"]
        return subprocess.CompletedProcess(argv, 0, b'{"path": "/x", "served_model_name": "an x"}')

    monkeypatch.setattr(os, "execv", become)
    monkeypatch.setattr(subprocess, "run", prepare)
    with pytest.raises(Became):
        cli.main(argv)


def test_help_and_mistakes(capsys: pytest.CaptureFixture[str]) -> None:
    for argv in ([], ["--help"], ["help"]):
        with pytest.raises(SystemExit, match="0"):
            cli.main(argv)
        assert "baton up" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="2"):
        cli.main(["down"])
    assert "no such command: down" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        cli.main(["up", "--prefil", "1"])
