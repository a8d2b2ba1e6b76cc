"""Becomes another program, and dies with its parent.

    python -m deploy.child PARENT_PID PROGRAM [ARGUMENT...]

1. Ask the kernel for SIGKILL when the parent ends, however it ends.
2. If the parent is gone already, end.
3. Become PROGRAM, in this same process: the parent sees its pid and its exit status.

A program between the parent and the child, instead of code between fork and exec, because the
parent has threads. Linux only, as is the fabric.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def command(*argv: str) -> tuple[str, ...]:
    """How to start `argv` as a child of this process."""
    return (sys.executable, "-m", "deploy.child", str(os.getpid()), *argv)


def main() -> None:
    parent, *argv = sys.argv[1:]
    if ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError("prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != int(parent):
        sys.exit("the parent is gone")
    os.execvp(argv[0], argv)


if __name__ == "__main__":
    main()
