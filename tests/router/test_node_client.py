"""OpenAI's own client for Node, the npm package `openai`, against our endpoint.

Its version is tests/node/package-lock.json's; it is installed once, into a folder of the user's
cache. Without node, npm or a way to the package there is nothing to test with.
"""

import hashlib
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.router.served_fakes import ANSWER

NODE = Path(__file__).parents[1] / "node"
LOCK = NODE / "package-lock.json"


@pytest.fixture(scope="module")
def installed() -> Path:
    """The folder where the locked version lies in node_modules."""
    if not shutil.which("node") or not shutil.which("npm"):
        pytest.skip("node and npm are not on this machine")
    cache = Path(os.environ.get("BATON_CACHE") or Path.home() / ".cache" / "baton")
    folder = cache / f"node-{hashlib.sha256(LOCK.read_bytes()).hexdigest()[:16]}"
    if (folder / "installed").is_file():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    for file in (LOCK, NODE / "package.json"):
        shutil.copy(file, folder)
    command = ["npm", "ci", "--no-audit", "--no-fund", "--ignore-scripts"]
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=120, check=False
    )
    if done.returncode != 0:
        pytest.skip(f"npm could not install the client: {done.stderr[-200:]}")
    (folder / "installed").touch()
    return folder


@pytest.fixture(scope="module")
def seen(installed: Path, served_url: str) -> dict[str, Any]:
    command = ["node", str(NODE / "client.mjs"), served_url, str(installed)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    told: dict[str, Any] = json.loads(done.stdout)
    return told


def test_answers(seen: dict[str, Any]) -> None:
    assert seen["chat"] == seen["stream"] == seen["helped"] == ANSWER
    assert seen["texts"] == [ANSWER] * 2
    assert seen["models"] == ["tiny"]
    assert seen["usage"]["completion_tokens"] > 3
    assert seen["id"]
    assert seen["left"]


def test_errors(seen: dict[str, Any]) -> None:
    assert seen["refused"][:3] == ["BadRequestError", 400, "temperature"]
    assert seen["missing"] == ["NotFoundError", 404, "model", "model_not_found"]
