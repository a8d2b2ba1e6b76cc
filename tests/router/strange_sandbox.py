"""router/grammar_sandbox.py with a compiler that does to its process what a text says."""

import os
import signal
import time
from pathlib import Path

from router import grammar_sandbox
from runtime.grammar import GrammarError, Vocabulary


def probe(vocabulary: Vocabulary, text: str) -> None:
    match text.split():
        case ["spins"]:
            while True:
                pass
        case ["is", "bounded"]:
            timers = signal.ITIMER_PROF, signal.ITIMER_REAL
            if all(0 < signal.getitimer(timer)[0] < 1 for timer in timers):
                raise GrammarError("bounded")
        case ["takes", seconds]:
            time.sleep(float(seconds))
        case ["sleeps"]:
            time.sleep(60)
        case ["fills"]:
            kept = []
            while True:
                kept.append(bytearray(1 << 20))
        case ["dies", name]:
            os.kill(os.getpid(), signal.Signals[name])
        case ["dies", "once", path] if not Path(path).exists():
            Path(path).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        case ["prints"]:
            os.write(1, b'{"refused": "by a library"}\n')
        case ["exits"]:
            raise RuntimeError
        case ["refuses"]:
            raise GrammarError("so says the test")


if __name__ == "__main__":
    grammar_sandbox.probe = probe
    grammar_sandbox.main()
