"""What both ends of a call need: its deadline, and the words for "not any more" and "not now"."""

import asyncio

RETRY_AFTER_MS = "baton-retry-after-ms"
"""Trailing metadata of a RESOURCE_EXHAUSTED: the queue is full, and in so many milliseconds will
not be, if nothing else comes."""


DRAINING = "baton-draining"
"""Trailing metadata of an UNAVAILABLE: the worker is well, and wants the call to go elsewhere."""


class Draining(Exception):
    """The worker finishes what it has and takes nothing new, or nothing of the kind."""

    trailing_metadata = ((DRAINING, "1"),)


def deadline(remaining_ms: int) -> asyncio.Timeout:
    """`async with deadline(ms)` raises TimeoutError when the time is over; 0 is no limit.

    Time left travels, never the time of day: clocks of two hosts differ.
    """
    return asyncio.timeout(remaining_ms / 1000 if remaining_ms else None)
