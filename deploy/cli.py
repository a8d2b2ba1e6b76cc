"""The `baton` command: `baton up` runs a cluster, `baton drain` and its like change a running one
(deploy/admin.py); the other words become another program, `python -m …`, in this same process.

Their flags are theirs: `baton decode --help` is the help of the worker. One flag is ours: with
`--model NAME` (or BATON_MODEL) the model is prepared first, and its folder is passed on.
"""

import os
import subprocess
import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from dataclasses import fields

from deploy import admin, completion, conformance, plan, up
from deploy.plan import Model, UpConfig
from deploy.worker_config import WorkerConfig
from runtime import flags
from runtime.exit_status import INTERRUPTED

USAGE = """\
usage: baton COMMAND [FLAG...]

Serves a language model with prefill and decode on different workers.

  baton up          a whole cluster on this machine, in the foreground
  baton chat        talk with it; `baton chat WORD...` asks one question
  baton status      what it does now: workers, queues, KV, latency, ledger (--watch)
  baton bench       put load on it: TTFT, TPOT, ITL and throughput, as a table, JSON, a plot
  baton doctor      can this machine serve? what it finds, and what to do about each
  baton completion  a script that completes these words in bash, zsh or fish

  baton prepare     fetch and convert a model; prints its folder
  baton router      one router, for workers that run already
  baton prefill     one prefill worker
  baton decode      one decode worker
  baton both        one worker that serves both
  baton keys T      makes an API key for tenant T, and the line for the router's key file

  baton conformance --url URL --url URL   does an endpoint do what OpenAI's clients expect, and
                                          two of them the same?

  baton workers     the workers of a running cluster, and what they do
  baton drain W     a worker takes nothing new; what it runs goes on, there or elsewhere
  baton flip W R    a worker serves R from now on: prefill, decode or both
  baton add H:P     a worker that runs already joins
  baton remove W    the router forgets a worker
  baton pin FILE    a prefix stays in the caches for a time; baton unpin, baton pins

Try:
  baton up                             one prefill and one decode worker, demo model
  baton up --prefill 2 --decode 2      two of each
  baton up --both 2                    and two that serve both roles
  baton up --mode colocated            the same answers without a handoff, to compare
  baton COMMAND --help                 all flags; each is also a variable BATON_<NAME>
"""

COMMANDS = {
    "router": (plan.ROUTER,),
    "prefill": (plan.WORKER, "--role", "prefill"),
    "decode": (plan.WORKER, "--role", "decode"),
    "both": (plan.WORKER, "--role", "both"),
}
"""Serving processes: they take `--model`."""

PROGRAMS = {
    "prepare": up.PREPARE,
    "keys": plan.NEW_KEY,
    "chat": "deploy.chat",
    "status": "deploy.status",
    "doctor": "deploy.doctor",
    "bench": "bench.command",
}


def main(argv: Sequence[str] | None = None) -> None:
    """Ends the process, or becomes another program. Ctrl-C is an end, and no error to be traced."""
    try:
        _run(argv)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


def _run(argv: Sequence[str] | None) -> None:
    command, *rest = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    if command == "up":
        sys.exit(up.main(_up_config(rest)))
    if command in PROGRAMS:
        _become(PROGRAMS[command], *rest)
    if command in COMMANDS:
        _become(*COMMANDS[command], *_with_model(command, rest))
    if command == "conformance":
        sys.exit(conformance.main(rest))
    if command in admin.COMMANDS:
        sys.exit(admin.main(command, rest))
    if command == "completion":
        words = ("up", "completion", "conformance", *PROGRAMS, *COMMANDS, *admin.COMMANDS)
        sys.exit(completion.main(rest, words, _help_of))
    if command in ("-h", "--help", "help"):
        print(USAGE, end="")
        sys.exit(0)
    print(f"baton: no such command: {command}\n\n{USAGE}", end="", file=sys.stderr)
    sys.exit(2)


def _help_of(command: str) -> str:
    if command in COMMANDS and COMMANDS[command][0] == plan.WORKER:  # its own loads torch first
        return " ".join(f"--{field.name.replace('_', '-')}" for field in fields(WorkerConfig))
    told = [sys.executable, "-m", "deploy.cli", command, "--help"]
    return subprocess.run(told, capture_output=True, text=True, check=False).stdout


def _become(*arguments: str) -> None:
    os.execv(sys.executable, [sys.executable, "-m", *arguments])


def _with_model(command: str, argv: list[str]) -> list[str]:
    """`argv` with the folder of the prepared model in place of `--model`."""
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--model", default=os.environ.get("BATON_MODEL"))
    options, rest = parser.parse_known_args(argv)
    if options.model is None:
        return rest
    prepare = [sys.executable, "-m", up.PREPARE, "--model", options.model]
    prepared = subprocess.run(prepare, stdout=subprocess.PIPE, check=False)
    if prepared.returncode != 0:
        sys.exit(prepared.returncode)
    model = Model.from_json(prepared.stdout)
    name = ["--served-model-name", model.served_model_name] if command == "router" else []
    return ["--model-path", model.path, *name, *rest]


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
