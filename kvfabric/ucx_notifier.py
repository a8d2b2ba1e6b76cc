"""Passes the ends of UCX's operations from ucxx's progress thread to the event loop.

ucxx's own notifier makes a task of each batch of them and waits for it, so it and the loop wake
each other twice. Here each is one call. Knows no ucxx.
"""

import asyncio
import threading
from typing import Any

_POOL_PERIOD_NS = 1_000_000_000  # how long it waits before it looks after ucxx's pool of futures
_END_S = 5.0
"""Several of those: it ends at once unless it never gets to run."""


class Notifier:
    """See the module. From the loop that the ends are for."""

    def __init__(self, worker: Any) -> None:
        """`worker`: ucxx's, whose notifier has ended."""
        self._worker = worker
        self._is_over = False
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name="ucx-notifier", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Waits for its end, for seconds at most. Not on the loop."""
        self._is_over = True
        self._worker.stop_request_notifier_thread()
        self._thread.join(_END_S)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)  # whose futures fill the pool
        worker = self._worker
        while not self._is_over:
            worker.populate_python_futures_pool()
            state = worker.wait_request_notifier(period_ns=_POOL_PERIOD_NS)
            if state.name == "Ready":  # "Shutdown" may have been said to ucxx's own
                self._tell()
        worker.clear_python_futures_pool()  # they hold the worker

    def _tell(self) -> None:
        try:
            self._loop.call_soon_threadsafe(self._worker.run_request_notifier)
        except RuntimeError:
            assert self._loop.is_closed()
            self._is_over = True
