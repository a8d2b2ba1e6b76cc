"""`baton conformance --url URL [--url URL]`: does an endpoint do what OpenAI's clients expect?

1. Every case (deploy/conformance_cases.py, deploy/conformance_errors.py) runs against each URL.
2. With two, for example one disaggregated and one colocated, what they say is compared: the same
   model must say the same. In float32 that holds to the letter; `--texts-may-differ` is for
   models in bfloat16, whose near ties fall one way or the other.
3. A table is printed, and the exit status is 0 if nothing is wrong, 1 if something is, 2 if a URL
   does not answer.
"""

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from deploy import conformance_errors
from deploy.conformance_api import Endpoint, Fault
from deploy.conformance_cases import CASES, Case

MAX_URLS = 2
_WIDTH = 160
"""Of the table in a file."""
_SHOWN = 200
"""Characters of a fault in the table."""

assert conformance_errors.REFUSED, "imported for its cases"


@dataclass(frozen=True)
class Row:
    """One case: what was wrong at each endpoint (empty: nothing), and between them."""

    name: str
    faults: tuple[str, ...]
    difference: str = ""

    @property
    def is_sound(self) -> bool:
        return not any(self.faults) and not self.difference


def main(argv: Sequence[str]) -> int:
    """The exit status."""
    options = _options(argv)
    console = Console(width=None if sys.stdout.isatty() else _WIDTH)
    try:
        with ExitStack() as stack, Console(stderr=True).status("Asking"):
            endpoints = [
                stack.enter_context(
                    Endpoint(
                        url, options.model, api_key=options.api_key, timeout_s=options.timeout_s
                    )
                )
                for url in options.url
            ]
            rows = run(CASES, endpoints, compare=not options.texts_may_differ)
    except Fault as fault:
        print(f"baton: {fault}", file=sys.stderr)
        return 2
    console.print(table(rows, options.url))
    wrong = [row.name for row in rows if not row.is_sound]
    console.print(f"{len(rows) - len(wrong)} of {len(rows)} cases are sound")
    return 1 if wrong else 0


def run(cases: Mapping[str, Case], endpoints: Sequence[Endpoint], *, compare: bool) -> list[Row]:
    return [_run(name, case, endpoints, compare) for name, case in cases.items()]


def _run(name: str, case: Case, endpoints: Sequence[Endpoint], compare: bool) -> Row:
    said: list[object] = []
    faults: list[str] = []
    for endpoint in endpoints:
        try:
            said.append(case(endpoint))
            faults.append("")
        except Fault as fault:
            faults.append(str(fault))
        except (LookupError, TypeError, ValueError) as error:
            faults.append(f"an answer of another shape: {type(error).__name__}: {error}")
    differs = compare and len(said) == MAX_URLS and said[0] != said[1]
    return Row(name, tuple(faults), f"{said[0]} / {said[1]}" if differs else "")


def table(rows: Sequence[Row], urls: Sequence[str]) -> Table:
    shown = Table("case", *urls, title="Conformance")
    if len(urls) == MAX_URLS:
        shown.add_column("the same?")
    for row in rows:
        cells = [_cell(fault) for fault in row.faults]
        if len(urls) == MAX_URLS:
            is_known = not any(row.faults)
            cells.append(_cell(row.difference) if is_known else "-")
        shown.add_row(row.name, *cells, style="" if row.is_sound else "red")
    return shown


def _cell(fault: str) -> str:
    return fault[:_SHOWN].replace("[", "\\[") if fault else "ok"


def _options(argv: Sequence[str]) -> Namespace:
    parser = ArgumentParser(
        prog="baton conformance",
        description="Runs the whole surface that OpenAI's clients use against one or two URLs, "
        "compares what they say and prints a table. Status 0: nothing is wrong.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--url", action="append", required=True, help="http://host:port; give two to compare"
    )
    parser.add_argument("--model", default="", help="default: the first that the server lists")
    parser.add_argument("--api-key", default="none", help="sent as a bearer key")
    parser.add_argument("--timeout-s", type=float, default=60.0, help="for each request")
    parser.add_argument(
        "--texts-may-differ",
        action="store_true",
        help="two endpoints are not compared: a model in bfloat16 may say one thing here and "
        "another there",
    )
    options = parser.parse_args(argv)
    if len(options.url) > MAX_URLS:
        parser.error(f"give at most {MAX_URLS} URLs")
    return options
