"""Which of a process's threads the operating system serves first."""

import os
import sys
import threading


def lower_priority(nice: int) -> None:
    """The calling thread gives way to the network's loops on its cores. It is never raised."""
    if sys.platform == "linux":  # a thread has a priority of its own only there
        thread_id = threading.get_native_id()
        present = os.getpriority(os.PRIO_PROCESS, thread_id)
        os.setpriority(os.PRIO_PROCESS, thread_id, max(nice, present))
