"""`baton status`: a cluster on one screen: workers, roles, queues, KV, handoffs, latency, ledger.

Reads `GET /v1/cluster` and `GET /v1/ledger` of a router. Once, or with `--watch` until Ctrl-C; then
a router that goes away is said to be away, and looked for again. `--json` is for programs.
"""

import json
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import httpx
from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from deploy import target
from deploy.target import NoRouter, ask
from runtime.exit_status import INTERRUPTED

Json = Mapping[str, Any]

WIDE = 80
"""Columns; with fewer, the bars and the slots are left out."""
KV_CELLS = 12
"""Width of the bar of a pool's blocks."""
KV_MARKS = {
    "held": "█", "promised": "▓", "in_flight": "▒", "pinned": "▪", "cached": "░", "free": "·"
}  # fmt: skip


def main(argv: Sequence[str]) -> int:
    parser = target.parser_of("status", __doc__)
    parser.add_argument("--watch", action="store_true", help="go on, until Ctrl-C")
    parser.add_argument("--every-s", type=float, default=1.0, metavar="X", help="with --watch")
    parser.add_argument("--json", action="store_true", help="what the router says, as one object")
    options = parser.parse_args(argv)
    console = Console(highlight=False)
    try:
        with target.client_of(options) as http:
            if options.json:
                print(json.dumps(_read(http)))
            elif options.watch:
                _watch(http, console, max(0.1, options.every_s))
            else:
                console.print(screen(_read(http), console.width))
    except NoRouter as error:
        print(f"baton: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 0 if options.watch else INTERRUPTED
    return 0


def _read(http: httpx.Client) -> dict[str, Any]:
    """Raises NoRouter."""
    return {**ask(http, "/v1/cluster"), "ledger": ask(http, "/v1/ledger")}


def _watch(http: httpx.Client, console: Console, every_s: float) -> None:
    with Live(console=console, auto_refresh=False, screen=console.is_terminal) as live:
        while True:
            try:
                shown = screen(_read(http), console.width)
            except NoRouter as error:
                shown = Text(f"{error} Looking again.", style="yellow")
            live.update(shown, refresh=True)
            time.sleep(every_s)


def screen(said: Json, width: int) -> RenderableType:
    """Of what `GET /v1/cluster` says, with `ledger`; a narrow terminal is told less of each."""
    cluster = said["cluster"]
    table = _workers(cluster["workers"], is_wide=width >= WIDE)
    return Group(_head(cluster), table, _latency(said), _ledger(said))


def _head(cluster: Json) -> Text:
    state = ("ready", "bold green") if cluster["ready"] else ("NOT READY", "bold red")
    moving = sum(1 for one in cluster["handoffs"] if one["state"] in ("computing", "shipping"))
    return Text.assemble(
        (cluster["model"], "bold"), f", {cluster['mode']}, ", state,
        f": {cluster['num_prompts']} prompts served now, {cluster['num_in_line']} of them in line, "
        f"{moving} handoffs under way",
    )  # fmt: skip


def _workers(workers: Sequence[Json], is_wide: bool) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, expand=False)
    table.add_column("worker", no_wrap=True)
    table.add_column("role", no_wrap=True)
    table.add_column("state", overflow="fold")
    numbers = ("run", "wait", "queue", "slots") if is_wide else ("run", "wait", "queue")
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("KV", no_wrap=True)
    for worker in workers:
        slots = f"{worker['send_slots_used']}/{worker['recv_slots_used']}"
        bar = kv_bar(worker["blocks"], worker["num_blocks"])
        table.add_row(
            worker["name"],
            worker["role"],
            _state(worker),
            str(worker["num_running"]),
            str(worker["num_waiting"] + worker["num_awaiting_kv"]),
            f"{worker['queue_ms']} ms",
            *((slots, f"{bar} {_in_use(worker)}") if is_wide else (_in_use(worker),)),
        )
    return table


def _state(worker: Json) -> Text:
    if worker["draining"]:
        return Text("draining", style="yellow")
    if worker["ready"]:
        return Text("ready", style="green")
    return Text(worker["problem"] or "not ready", style="red")


def kv_bar(blocks: Mapping[str, int], num_blocks: int) -> str:
    """`KV_CELLS` marks, each state with its share; what is there at all shows."""
    bar = ""
    for state, mark in KV_MARKS.items():
        count = blocks[state]
        cells = round(KV_CELLS * count / num_blocks) if num_blocks else 0
        if state != "free":
            bar += mark * max(cells, 1 if count else 0)
    return bar[:KV_CELLS].ljust(KV_CELLS, KV_MARKS["free"])


def _in_use(worker: Json) -> str:
    used = worker["num_blocks"] - worker["blocks"]["free"] - worker["blocks"]["cached"]
    return f"{100 * used / worker['num_blocks']:3.0f} %" if worker["num_blocks"] else "  -"


def _latency(said: Json) -> Text:
    latency = said["latency"]

    def told(name: str) -> str:
        figures = latency[name]
        if not figures["count"]:
            return f"{name.upper()} -"
        return f"{name.upper()} {figures['p50_ms']:.0f} ms (p99 {figures['p99_ms']:.0f})"

    minutes = latency["window_s"] / 60
    return Text(f"Last {minutes:g} minutes: {told('ttft')}, {told('tpot')}")


def _ledger(said: Json) -> Text:
    problems = ledger_problems(said["ledger"])
    if problems:
        return Text("Ledger: " + "; ".join(problems), style="red")
    return Text("Ledger: every block and slot in use is a live request's", style="dim")


def ledger_problems(ledger: Json) -> list[str]:
    """What is amiss in `GET /v1/ledger`."""
    problems = []
    for books in ledger["workers"]:
        name = books["worker"]
        if books["problem"]:
            problems.append(f"{name} does not tell its ledger ({books['problem']})")
        elif not books["adds_up"] or books["violations"]:
            problems.append(f"{name} has blocks or slots that are nobody's")
    for orphan in ledger["orphans"]:
        age_s = orphan["age_ms"] / 1e3
        problems.append(f"{orphan['worker']}: {orphan['owner']} is no request here ({age_s:.0f} s)")
    return problems


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
