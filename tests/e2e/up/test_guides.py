"""Every command of the guides does what it says it does.

What talks with a cluster is run against one, in the order of the guide; what would start servers is
only parsed, flags and all; a script's arguments must exist.
"""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from deploy.plan import UpConfig
from deploy.worker_config import WorkerConfig
from router.config import RouterConfig
from runtime import flags
from tests.e2e.up.cluster_up import Up

ROOT = Path(__file__).parents[3]
GUIDES = sorted((ROOT / "docs/guides").glob("*.md"))
SERVERS = ("up", "prefill", "decode", "both", "router")


def commands_of(guide: Path) -> list[str]:
    blocks = re.findall(r"^```console\n(.*?)^```", guide.read_text(), re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()]
    assert all(line.startswith("$ ") for line in lines), lines
    return [line.removeprefix("$ ") for line in lines]


def is_server(command: str) -> bool:
    return command.startswith(tuple(f"baton {word} " for word in SERVERS))


def parse(command: str) -> None:
    """Ends the test where a flag is not there."""
    _, word, *argv = shlex.split(command)
    if word == "up":
        config = flags.parse(UpConfig, argv, prog=command, description="", environ={})
        parse_worker("decode", shlex.split(config.worker_args))
        parse_router(shlex.split(config.router_args))
        return
    if "--model" in argv:
        argv[argv.index("--model")] = "--model-path"
    if word == "router":
        parse_router(argv)
    else:
        parse_worker(word, argv)


def parse_worker(role: str, argv: list[str]) -> None:
    needed = ["--role", role, "--model-path", "/model"]
    flags.parse(WorkerConfig, [*needed, *argv], prog="worker", description="", environ={})


def parse_router(argv: list[str]) -> None:
    needed = ["--model-path", "/model", "--served-model-name", "model"]
    flags.parse(RouterConfig, [*needed, *argv], prog="router", description="", environ={})


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """PATH, with a `baton` that is this checkout's."""
    folder = tmp_path_factory.mktemp("bin")
    (folder / "baton").write_text(f'#!/bin/sh\nexec {sys.executable} -m deploy.cli "$@"\n')
    (folder / "baton").chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


def test_each_guide_has_commands_and_is_named_in_the_readme() -> None:
    readme = (ROOT / "README.md").read_text()
    for guide in GUIDES:
        assert commands_of(guide), guide.name
        assert f"docs/guides/{guide.name}" in readme


@pytest.mark.parametrize("guide", GUIDES, ids=lambda guide: guide.stem)
def test_links_lead_somewhere(guide: Path) -> None:
    for link in re.findall(r"\]\(([^)#]+)", guide.read_text()):
        assert (guide.parent / link).exists(), link


@pytest.mark.parametrize("up", ["disaggregated"], indirect=True)
def test_every_command_works(up: Up, path: str) -> None:
    commands = dict.fromkeys(line for guide in GUIDES for line in commands_of(guide))
    environ = os.environ | {"PATH": path, "BATON_RUN_DIR": str(up.run_dir)}
    for command in commands:
        if is_server(command):
            parse(command)
        elif command.startswith("scripts/"):
            assert all((ROOT / word).exists() for word in command.split() if "/" in word), command
        else:
            command = command.replace("http://127.0.0.1:8000", up.url)
            done = subprocess.run(
                ["bash", "-o", "pipefail", "-c", command],
                env=environ, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False,
            )  # fmt: skip
            assert done.returncode == 0, (command, done.stdout, done.stderr)
            assert '"error": {' not in done.stdout, (command, done.stdout)
