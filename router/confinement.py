"""The inner side of a `LineProcess` (router/line_process.py): what the kernel allows it.

Whatever runs out of its time is killed by the kernel, in the middle of a C function too; whatever
asks for more memory does not get it.
"""

import json
import os
import resource
import signal
import sys
from pathlib import Path


def keep_answers_apart() -> None:
    """What a library prints is none: from now on it goes nowhere."""
    sys.stdout = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def confine(memory_nbytes: int) -> None:
    """`memory_nbytes`: of the process's addresses."""
    for number in (signal.SIGPROF, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)
    # A terminal's goes to all of its processes; this one ends with its parent.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_AS, (memory_nbytes, memory_nbytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def used_nbytes() -> int:
    """Of the process's addresses."""
    num_pages = int(Path("/proc/self/statm").read_text().split()[0])
    return num_pages * resource.getpagesize()


def allow(cpu_s: float, wall_s: float = 0) -> None:
    """From now until the next `say`; 0 sets no bound."""
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    signal.setitimer(signal.ITIMER_REAL, wall_s)


def say(told: object) -> None:
    allow(0)
    sys.stdout.write(json.dumps(told) + "\n")
    sys.stdout.flush()
