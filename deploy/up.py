"""`baton up`: a whole cluster on this machine, in the foreground.

1. Take the run directory; check that what was asked for can be.
2. Prepare the model (`python -m engine.prepare`, which the first time takes a while).
3. Start workers and router. One that ends before all are ready ends the whole with its last words.
4. Print one line on stdout: the cluster is ready, and how to ask it something.
5. Start again whatever dies, until SIGINT, SIGTERM or SIGHUP; then stop all within 5 seconds.

Everything but that one line goes to stderr.
"""

import asyncio
import json
import os
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE
from collections import deque
from pathlib import Path

from rich.console import Console

from deploy import child, plan
from deploy.placement import BadCores, BadGpus
from deploy.plan import BadPlan, Model, Plan, UpConfig
from deploy.processes import Supervisor
from deploy.readiness import until_ready
from deploy.state import Member, RunDir, RunDirUnusable

PREPARE = "engine.prepare"
"""Module, started with `python -m`: prints the model's folder and name as one JSON object."""

PATIENCE_S = 4.0
"""A process that is still there this long after SIGTERM is killed."""

LAST_WORDS = 20
"""Lines of a log that are shown when its process ends before the cluster is ready."""

console = Console(stderr=True, markup=False, highlight=False, soft_wrap=True)


class CannotStart(Exception):
    """The cluster did not become ready; the text says why, for people."""


def main(config: UpConfig) -> int:
    """Runs a cluster until it is told to stop; the exit status."""
    try:
        asyncio.run(_until_signal(config))
    except (BadPlan, BadCores, BadGpus, CannotStart, RunDirUnusable) as error:
        console.print(f"baton: {error}", style="red")
        return 1
    return 0


async def _until_signal(config: UpConfig) -> None:
    """The first signal stops the cluster; a second one, meanwhile, kills it at once."""
    cluster = asyncio.ensure_future(_up(config))
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(signum, cluster.cancel)
    await asyncio.wait([cluster])
    if not cluster.cancelled():
        cluster.result()


async def _up(config: UpConfig) -> None:
    with RunDir(Path(config.run_dir)) as run_dir:
        plan.check(config)
        run_dir.draw_admin_token()
        model = await _prepare(config)
        made = plan.make(config, model, run_dir.log, os.environ, run_dir.admin_token_file)
        supervisor = Supervisor(
            made.specs, on_change=lambda: _record(run_dir, supervisor), say=console.print
        )
        try:
            await supervisor.start()
            await _become_ready(made, supervisor, config.ready_timeout_s)
            console.print(f"{made.placement}; logs are in {run_dir.path}")
            print(ready_line(made), flush=True)
            await supervisor.keep()
        finally:
            await _stop(supervisor)


async def _prepare(config: UpConfig) -> Model:
    """The model as a folder that workers can load. Its progress shows on our stderr."""
    process = await asyncio.create_subprocess_exec(
        *child.command(sys.executable, "-m", PREPARE, "--model", config.model),
        env=plan.child_environ(os.environ),
        stdin=DEVNULL,
        stdout=PIPE,
        process_group=0,
    )
    try:
        output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode != 0:
        raise CannotStart(f"cannot prepare the model {config.model}")
    return Model.from_json(output)


async def _become_ready(made: Plan, supervisor: Supervisor, timeout_s: float) -> None:
    """Raises CannotStart if a process ends first, or the time is up."""
    ready = asyncio.create_task(until_ready(made))
    ended = asyncio.create_task(supervisor.first_end())
    names = ", ".join(spec.name for spec in made.specs)
    try:
        with console.status(f"Starting {names}"):
            await asyncio.wait(
                {ready, ended}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
            )
        if ended.done():
            spec, how = ended.result()
            raise CannotStart(f"{spec.name} {how} at its start:\n{_end_of(spec.log)}")
        if not ready.done():
            logs = made.specs[0].log.parent
            raise CannotStart(f"not ready after {timeout_s:g} s; see the logs in {logs}")
        ready.result()
    finally:
        ready.cancel()
        ended.cancel()


async def _stop(supervisor: Supervisor) -> None:
    try:
        with console.status("Stopping"):
            await supervisor.stop(PATIENCE_S)
    finally:
        supervisor.kill()


def _record(run_dir: RunDir, supervisor: Supervisor) -> None:
    run_dir.write(
        [
            Member(spec.name, spec.role, supervisor.pid(spec.name), spec.addresses, str(spec.log))
            for spec in supervisor.specs
        ]
    )


def ready_line(made: Plan) -> str:
    """One line for a person: a request to paste into a shell."""
    question = {"role": "user", "content": "What is the capital of France?"}
    request = {"model": made.model.served_model_name, "messages": [question], "temperature": 0}
    body = json.dumps(request | {"max_tokens": 64})
    header = "Content-Type: application/json"
    return f"Ready: curl {made.url}/v1/chat/completions -H '{header}' -d '{body}'"


def _end_of(log: Path) -> str:
    with log.open(errors="replace") as lines:
        return "".join(deque(lines, LAST_WORDS)).rstrip()
