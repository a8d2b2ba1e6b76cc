"""The notifier of UCX's ends, with a worker of ours."""

import asyncio
import queue
import threading
from types import SimpleNamespace

from kvfabric.ucx_notifier import Notifier

PATIENCE_S = 5.0


class Worker:
    """As much of ucxx's as a notifier asks for."""

    def __init__(self) -> None:
        self.said: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.told_on: list[int] = []
        self.told_twice = asyncio.Event()
        self.loops: list[asyncio.AbstractEventLoop] = []
        self.is_cleared = False

    def populate_python_futures_pool(self) -> None:
        self.loops.append(asyncio.get_event_loop_policy().get_event_loop())

    def wait_request_notifier(self, period_ns: int) -> SimpleNamespace:
        return SimpleNamespace(name=self.said.get(timeout=period_ns / 1e9 + PATIENCE_S))

    def run_request_notifier(self) -> None:
        self.told_on.append(threading.get_ident())
        if len(self.told_on) == 2:
            self.told_twice.set()

    def stop_request_notifier_thread(self) -> None:
        self.said.put("Shutdown")

    def clear_python_futures_pool(self) -> None:
        self.is_cleared = True


async def test_ends_come_to_the_loop_until_it_is_stopped() -> None:
    worker, loop = Worker(), asyncio.get_running_loop()
    notifier = Notifier(worker)
    # The first was meant for ucxx's own notifier.
    for state in ("Shutdown", "Ready", "Timeout", "Ready"):
        worker.said.put(state)
    await asyncio.wait_for(worker.told_twice.wait(), PATIENCE_S)
    await asyncio.to_thread(notifier.stop)
    assert worker.is_cleared
    assert worker.told_on == 2 * [threading.get_ident()]
    assert set(worker.loops) == {loop}


def test_a_loop_that_is_gone_ends_it() -> None:
    worker = Worker()

    async def start() -> Notifier:
        return Notifier(worker)

    notifier = asyncio.run(start())
    worker.said.put("Ready")
    notifier._thread.join(PATIENCE_S)
    assert worker.is_cleared
