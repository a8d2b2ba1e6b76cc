"""What may come after the words that stand there, and the scripts that ask."""

import shutil
import subprocess
from pathlib import Path

import pytest

from deploy import cli
from deploy.completion import SCRIPTS, next_words

COMMANDS = ("up", "status", "completion")
HELP = "usage: baton status [-h] [--url URL] [--json]\n  --json   as --url has it, not ---x or a--b"


def test_words() -> None:
    def words(*before: str) -> list[str]:
        return next_words(before, COMMANDS, lambda command: HELP)

    assert words() == ["completion", "status", "up"]
    assert words("status") == ["--json", "--url"]
    assert words("status", "--url=http://x") == ["--json"]
    assert words("completion") == ["bash", "fish", "zsh"]
    assert words("completion", "bash") == []
    assert words("nonsense") == []


def test_every_command_has_help(capsys: pytest.CaptureFixture[str]) -> None:
    """Each word of the usage is a command that completion knows."""
    with pytest.raises(SystemExit, match="0"):
        cli.main(["completion", "--words"])
    known = set(capsys.readouterr().out.split())
    told = {line.split()[1] for line in cli.USAGE.splitlines() if line.startswith("  baton ")}
    assert {word for word in told if word.islower()} <= known


def test_flags_of_a_worker_need_no_torch(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        cli.main(["completion", "--words", "decode"])
    assert "--kv-memory" in capsys.readouterr().out.split()


@pytest.mark.parametrize("shell", SCRIPTS)
def test_scripts_are_valid(shell: str, tmp_path: Path) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    script = tmp_path / "script"
    script.write_text(SCRIPTS[shell])
    subprocess.run([shell, "-n", str(script)], check=True, timeout=20)


def test_bash_completes(tmp_path: Path) -> None:
    """With a `baton` that answers as ours would."""
    baton = tmp_path / "baton"
    baton.write_text("#!/bin/sh\nprintf '%s\\n' --watch --json \"$*\"\n")
    baton.chmod(0o755)
    ask = 'COMP_WORDS=(baton status --w); COMP_CWORD=2; _baton; echo "${COMPREPLY[@]}"'
    told = subprocess.run(
        ["bash", "-c", f"{SCRIPTS['bash']}\n{ask}"],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
        timeout=20,
    )
    assert told.stdout.strip() == "--watch"
