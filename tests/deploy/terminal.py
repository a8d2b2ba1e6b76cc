"""`baton` on a terminal of its own, as wide and as colourful as is wanted."""

import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType

import pexpect

BATON = ("-m", "deploy.cli")
ESCAPE = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


@contextmanager
def terminal(
    *words: str,
    program: Sequence[str] = BATON,
    columns: int = 100,
    more: Mapping[str, str] = MappingProxyType({}),
    **environ: str,
) -> Iterator["pexpect.spawn[str]"]:
    """`baton WORDS`, or what stands for it; ended at the end. `more` and `environ` are added to
    the environment."""
    kept = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
    child = pexpect.spawn(
        sys.executable,
        [*program, *words],
        env={**kept, "TERM": "xterm-256color", **more, **environ},
        dimensions=(40, columns),
        encoding="utf-8",
        timeout=30,
    )
    try:
        yield child
    finally:
        child.close(force=True)


def rest_of(child: "pexpect.spawn[str]") -> tuple[str, int]:
    """What it shows from here to its end, and its exit status."""
    shown: str = child.read()
    child.wait()
    assert child.exitstatus is not None, f"killed by signal {child.signalstatus}: {shown}"
    return shown.replace("\r\n", "\n"), child.exitstatus


def run(*words: str, columns: int = 100, **environ: str) -> tuple[str, int]:
    """What `baton WORDS` shows, to its end, and its exit status."""
    with terminal(*words, columns=columns, more=environ) as child:
        return rest_of(child)
