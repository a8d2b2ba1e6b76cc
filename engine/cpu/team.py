"""Threads that run one function together.

The caller is the first of them; the others sleep between calls. `run` does not wait for those that
have not woken up by the time the work is done (see sync.py: they find none left), so the function
must take all that it uses as arguments, and write nothing that is used again before `run` is called
the next time but under a claim.
"""

import logging
import os
import queue
import sys
import threading
from collections.abc import Callable
from functools import partial

logger = logging.getLogger(__name__)

_Job = Callable[[int], None]
_CLOSE_TIMEOUT_S = 10.0


class Team:
    """See the module. One caller at a time."""

    def __init__(self, num_threads: int, nice: int = 0) -> None:
        """The others start with the first `run`, at the caller's priority or lower."""
        self.num_threads = num_threads
        self._nice = nice
        self._jobs: list[queue.SimpleQueue[_Job | None]] = [
            queue.SimpleQueue() for _ in range(num_threads - 1)
        ]
        self._threads: list[threading.Thread] = []

    def run(self, function: Callable[[int], None]) -> None:
        """function(thread) for each thread, 0 here."""
        if not self._threads:
            self._start()
        for jobs in self._jobs:
            jobs.put(function)
        function(0)

    def close(self) -> None:
        """Ends and joins the others; one that does not end in time is left to the process's end."""
        for jobs in self._jobs:
            jobs.put(None)
        for thread in self._threads:
            thread.join(_CLOSE_TIMEOUT_S)
            if thread.is_alive():
                logger.error("%s did not end in %.0f s", thread.name, _CLOSE_TIMEOUT_S)
        self._threads = []

    def _start(self) -> None:
        for index, jobs in enumerate(self._jobs, start=1):
            name, target = f"engine-{index}", partial(self._work, index, jobs)
            thread = threading.Thread(target=target, name=name, daemon=True)
            thread.start()
            self._threads.append(thread)

    def _work(self, index: int, jobs: "queue.SimpleQueue[_Job | None]") -> None:
        if sys.platform == "linux":  # a thread has a priority of its own only there
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), self._nice)
        while (job := jobs.get()) is not None:
            try:
                job(index)
            except Exception:
                logger.exception("a thread of the engine's team failed")
            job = None
