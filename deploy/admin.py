"""`baton workers`, `drain`, `pin` and their like: an operator's words to a router's admin API.

Where the API is, and its token, come from the run directory of a `baton up` on this machine, unless
they are given. Several routers share nothing: a role is heard by all of them from the worker, but
who joins or leaves is to be said to each.
"""

import json
import os
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx

from deploy.state import RunDir

TIMEOUT_S = 10.0
LOOK_S = 0.2
"""Between two looks at a worker that drains."""
PATIENCE_S = 10.0
"""Beyond the grace."""

ROLES = {"prefill": ["prefill"], "decode": ["decode"], "both": ["prefill", "decode"]}

Worker = Mapping[str, Any]
Pin = Mapping[str, Any]


class Refused(Exception):
    """The admin API cannot be asked, or says no; the text is for people."""


class Admin:
    """A client of the admin API."""

    def __init__(self, url: str, token: str) -> None:
        self._http = httpx.Client(
            base_url=url,
            headers={"Authorization": f"Bearer {token}"},
            timeout=TIMEOUT_S,
            trust_env=False,
        )

    def __enter__(self) -> "Admin":
        return self

    def __exit__(self, *exception: object) -> None:
        self._http.close()

    def workers(self) -> list[Worker]:
        return self._listed("GET", "/admin/workers")

    def add(self, address: str) -> list[Worker]:
        return self._listed("POST", "/admin/workers", {"address": address})

    def remove(self, worker: str) -> list[Worker]:
        return self._listed("DELETE", f"/admin/workers/{quote(worker, safe='')}")

    def assign(self, worker: str, roles: Sequence[str], grace_s: float) -> Worker:
        body = {"roles": [*roles], "grace_s": grace_s}
        return self._ask("POST", f"/admin/workers/{quote(worker, safe='')}/roles", body)

    def pins(self) -> list[Pin]:
        found: list[Pin] = self._ask("GET", "/admin/pins")["pins"]
        return found

    def pin(self, body: Mapping[str, object]) -> Pin:
        return self._ask("POST", "/admin/pins", body)

    def unpin(self, name: str) -> None:
        self._ask("DELETE", f"/admin/pins/{quote(name, safe='')}")

    def _listed(self, method: str, path: str, body: object = None) -> list[Worker]:
        workers: list[Worker] = self._ask(method, path, body)["workers"]
        return workers

    def _ask(self, method: str, path: str, body: object = None) -> Mapping[str, Any]:
        """Raises Refused."""
        try:
            response = self._http.request(method, path, json=body)
            answer: Mapping[str, Any] = response.json()
        except (httpx.HTTPError, ValueError) as error:
            why = str(error) or type(error).__name__
            raise Refused(f"the admin API does not answer: {why}") from error
        if response.status_code != HTTPStatus.OK:
            raise Refused(answer["error"]["message"])
        return answer


def main(command: str, argv: Sequence[str]) -> int:
    """Runs one of `COMMANDS`; the exit status."""
    options = _parser(command).parse_args(argv)
    try:
        with Admin(*_where(options)) as admin:
            COMMANDS[command][1](admin, options)
    except Refused as refusal:
        print(f"baton: {refusal}", file=sys.stderr)
        return 1
    return 0


def _workers(admin: Admin, options: Namespace) -> None:
    _show(admin.workers())


def _add(admin: Admin, options: Namespace) -> None:
    _show(admin.add(options.worker))


def _remove(admin: Admin, options: Namespace) -> None:
    _show(admin.remove(options.worker))


def _drain(admin: Admin, options: Namespace) -> None:
    _assign(admin, options, [])
    if options.wait:
        _until_idle(admin, options.worker, options.grace_s + PATIENCE_S)


def _flip(admin: Admin, options: Namespace) -> None:
    _assign(admin, options, ROLES[options.role])


def _assign(admin: Admin, options: Namespace, roles: Sequence[str]) -> None:
    worker = admin.assign(options.worker, roles, options.grace_s)
    _show([worker])
    if worker["num_leaving"]:
        text = f"{worker['num_leaving']} calls end there, or elsewhere after {options.grace_s:g} s"
        print(text, file=sys.stderr)


def _pins(admin: Admin, options: Namespace) -> None:
    _show_pins(admin.pins())


def _pin(admin: Admin, options: Namespace) -> None:
    try:
        text = sys.stdin.read() if options.file == "-" else Path(options.file).read_text()
    except (OSError, ValueError) as error:
        raise Refused(f"cannot read {options.file}: {error}") from error
    prefix: dict[str, object] = {"prompt": text}
    if options.system:
        prefix = {"messages": [{"role": "system", "content": text}]}
    more = {"ttl_s": options.ttl_s, "name": options.name, "cache_salt": options.cache_salt}
    _show_pins([admin.pin({**prefix, **more})])


def _unpin(admin: Admin, options: Namespace) -> None:
    admin.unpin(options.name)


def _show_pins(pins: Sequence[Pin]) -> None:
    for pin in pins:
        left = f"{pin['remaining_s']:.0f} s left"
        print(f"{pin['name']:20} {pin['num_tokens']} tokens, {left}")
        for one in pin["workers"]:
            blocks = f"{one['num_pinned']} of {one['num_blocks']} blocks"
            state = one["problem"] or f"{blocks}; at most {one['max_pinned']} of all pins"
            print(f"  {one['worker']:18} {state}")


def _until_idle(admin: Admin, worker: str, timeout_s: float) -> None:
    """Raises Refused if it is not in time."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        found = [one for one in admin.workers() if worker in (one["name"], one["address"])]
        if not any(one["num_running"] or one["serves"] for one in found):
            return
        time.sleep(LOOK_S)
    raise Refused(f"{worker} still has requests after {timeout_s:g} s")


def _show(workers: Sequence[Worker]) -> None:
    for worker in workers:
        serves = "+".join(worker["serves"]) or "nothing"
        ready = all(worker["ready"].values()) if worker["ready"] else False
        problems = "; ".join(sorted(set(worker["problem"].values())))
        state = "ready" if ready else problems or "not ready"
        running = f"{worker['num_running']} running"
        print(f"{worker['name']:20} {worker['address']:24} {serves:16} {running:12} {state}")


COMMANDS: dict[str, tuple[str, Callable[[Admin, Namespace], None]]] = {
    "workers": ("Shows the workers that a router knows.", _workers),
    "add": ("A worker that runs already joins a router.", _add),
    "remove": ("A router forgets a worker; what it runs there ends there.", _remove),
    "drain": (
        "A worker takes nothing new. What it runs ends there within the grace, or goes on "
        "elsewhere; no client notices.",
        _drain,
    ),
    "flip": ("A worker serves another role from now on, without another start.", _flip),
    "pins": ("Shows the prefixes that are pinned.", _pins),
    "pin": (
        "The KV of a prefix stays in the caches of all workers that have it, or come to have it, "
        "for a time, up to a part of each cache (--pin-share of the workers).",
        _pin,
    ),
    "unpin": ("A pinned prefix may be evicted again.", _unpin),
}


def _parser(command: str) -> ArgumentParser:
    parser = ArgumentParser(
        prog=f"baton {command}", description=COMMANDS[command][0], allow_abbrev=False
    )
    if command == "add":
        parser.add_argument("worker", metavar="HOST:PORT", help="its gRPC address")
    elif command in ("remove", "drain", "flip"):
        parser.add_argument("worker", metavar="WORKER", help="its name, or its address")
    if command == "flip":
        parser.add_argument("role", choices=ROLES, help="what it shall serve")
    if command in ("drain", "flip"):
        text = "time that calls have to end there, in seconds (default: %(default)s)"
        parser.add_argument("--grace-s", type=float, default=30.0, metavar="X", help=text)
    if command == "drain":
        text = "return at once, not when the worker is idle"
        parser.add_argument("--no-wait", dest="wait", action="store_false", help=text)
    if command == "pin":
        _add_pin_options(parser)
    if command == "unpin":
        parser.add_argument("name", metavar="NAME", help="as baton pins shows it")
    run_dir = os.environ.get("BATON_RUN_DIR", ".baton")
    parser.add_argument("--run-dir", default=run_dir, help="of baton up (default: %(default)s)")
    parser.add_argument("--admin", default="", metavar="URL", help="of another router's admin API")
    parser.add_argument("--admin-token-file", default="", metavar="FILE", help="its token")
    return parser


def _add_pin_options(parser: ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="with the text of the prefix; -: from stdin")
    text = "the text is the system message of a conversation, not the beginning of a prompt"
    parser.add_argument("--system", action="store_true", help=text)
    text = "how long, in seconds (default: %(default)s)"
    parser.add_argument("--ttl-s", type=float, default=3600.0, metavar="X", help=text)
    text = "for baton unpin; the same name again replaces it (default: made of what it pins)"
    parser.add_argument("--name", default="", metavar="NAME", help=text)
    text = "of the requests that shall find it"
    parser.add_argument("--cache-salt", default="", metavar="SALT", help=text)


def _where(options: Namespace) -> tuple[str, str]:
    """URL and token. Raises Refused."""
    run_dir = RunDir(Path(options.run_dir))
    try:
        url = options.admin or f"http://{_admin_address(run_dir)}"
        token_file = Path(options.admin_token_file or run_dir.admin_token_file)
        return url, token_file.read_text().strip()
    except (OSError, LookupError, ValueError) as error:
        raise Refused(
            f"no cluster of baton up in {run_dir.path} ({error}); say --run-dir, or --admin and "
            "--admin-token-file"
        ) from error


def _admin_address(run_dir: RunDir) -> str:
    members = json.loads(run_dir.cluster_file.read_text())
    address: str = next(one["addresses"]["admin"] for one in members if one["role"] == "router")
    return address
