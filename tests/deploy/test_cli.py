"""The words of the `baton` command."""

import os

import pytest

from deploy import cli


@pytest.mark.parametrize(
    ("argv", "program"),
    [
        (["router", "--port", "1"], ["-m", "router", "--port", "1"]),
        (["prefill", "--help"], ["-m", "deploy.worker", "--role", "prefill", "--help"]),
        (["decode"], ["-m", "deploy.worker", "--role", "decode"]),
        (["prepare", "--model", "x"], ["-m", "engine.prepare", "--model", "x"]),
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

    monkeypatch.setattr(os, "execv", become)
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
