"""Which router a command talks to: the one named by `--url`, or that of a `baton up` here."""

import json
import os
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from pathlib import Path
from typing import Any

import httpx

from deploy.state import RunDir

TIMEOUT_S = 10.0


class NoRouter(Exception):
    """Nothing answers there, or not as a router does; the text says what to do, for people."""


def parser_of(command: str, description: str | None) -> ArgumentParser:
    """Of a command that talks with a router; `description` is its module's docstring."""
    parser = ArgumentParser(
        prog=f"baton {command}",
        description=description,
        formatter_class=RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    run_dir = os.environ.get("BATON_RUN_DIR", ".baton")
    parser.add_argument("--url", default="", help="of the router; else that of --run-dir")
    parser.add_argument("--run-dir", default=run_dir, help="of baton up (default: %(default)s)")
    parser.add_argument(
        "--api-key-file", default="", metavar="FILE", help="holds an API key (or BATON_API_KEY)"
    )
    return parser


def url_of(options: Namespace) -> str:
    """Raises NoRouter."""
    if options.url:
        return str(options.url).rstrip("/").removesuffix("/v1")
    run_dir = RunDir(Path(options.run_dir))
    try:
        members = json.loads(run_dir.cluster_file.read_text())
        http = next(one["addresses"]["http"] for one in members if one["role"] == "router")
    except (OSError, LookupError, ValueError, StopIteration) as error:
        raise NoRouter(
            f"no cluster of baton up in {run_dir.path}: start one with `baton up`, or say --url "
            "http://HOST:PORT of a router"
        ) from error
    return f"http://{http}"


def client_of(options: Namespace) -> httpx.Client:
    """Raises NoRouter."""
    key = os.environ.get("BATON_API_KEY", "")
    if options.api_key_file:
        try:
            key = Path(options.api_key_file).read_text().strip()
        except OSError as error:
            raise NoRouter(f"cannot read --api-key-file: {error}") from error
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return httpx.Client(
        base_url=url_of(options), headers=headers, timeout=TIMEOUT_S, trust_env=False
    )


def ask(http: httpx.Client, path: str) -> dict[str, Any]:
    """The JSON at `path`. Raises NoRouter."""
    try:
        response = http.get(path)
        answer = response.json()
    except (httpx.HTTPError, ValueError) as error:
        raise NoRouter(why(http, error)) from error
    if response.is_error:
        raise NoRouter(refusal(answer) or f"{http.base_url} answers {response.status_code}")
    if not isinstance(answer, dict):
        raise NoRouter(f"{http.base_url} is no router of Baton's")
    return answer


def why(http: httpx.Client, error: Exception) -> str:
    said = str(error) or type(error).__name__
    return f"the router at {http.base_url} does not answer ({said}): is `baton up` running?"


def refusal(answer: object) -> str:
    """The message of an error object of OpenAI's; empty if it is none."""
    if isinstance(answer, dict) and isinstance(error := answer.get("error"), dict):
        return str(error.get("message", ""))
    return ""
