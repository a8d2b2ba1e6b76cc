"""The `baton` command: `baton up` runs a cluster; the other words start one process each.

`up` is the only one that runs here. The others become `python -m …`, in this same process, and
their flags are theirs: `baton decode --help` is the help of the worker.
"""

import os
import sys
from collections.abc import Sequence

from deploy import up
from deploy.plan import UpConfig
from runtime import flags

USAGE = """\
usage: baton COMMAND [FLAG...]

Serves a language model with prefill and decode on different workers.

  baton up          a whole cluster on this machine, in the foreground
  baton prepare     fetch and convert a model; prints its folder
  baton router      one router, for workers that run already
  baton prefill     one prefill worker
  baton decode      one decode worker

Try:
  baton up                             one prefill and one decode worker, demo model
  baton up --prefill 2 --decode 2      two of each
  baton up --mode colocated            the same answers without a handoff, to compare
  baton COMMAND --help                 all flags; each is also a variable BATON_<NAME>
"""

COMMANDS = {
    "prepare": ("engine.prepare",),
    "router": ("router",),
    "prefill": ("deploy.worker", "--role", "prefill"),
    "decode": ("deploy.worker", "--role", "decode"),
}


def main(argv: Sequence[str] | None = None) -> None:
    """Ends the process, or becomes another program."""
    command, *rest = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    if command == "up":
        sys.exit(up.main(_up_config(rest)))
    if command in COMMANDS:
        os.execv(sys.executable, [sys.executable, "-m", *COMMANDS[command], *rest])
    if command in ("-h", "--help", "help"):
        print(USAGE, end="")
        sys.exit(0)
    print(f"baton: no such command: {command}\n\n{USAGE}", end="", file=sys.stderr)
    sys.exit(2)


def _up_config(argv: Sequence[str]) -> UpConfig:
    return flags.parse(
        UpConfig,
        argv,
        prog="baton up",
        description="Starts a router and workers as processes on this machine, restarts those "
        "that die, and stops all on Ctrl-C. Prints one line on stdout when ready.",
    )


if __name__ == "__main__":
    main()
