"""What every handler of a call needs: its deadline, and the word for "not any more"."""

import asyncio


class Draining(Exception):
    """The worker finishes what it has and takes nothing new."""


def deadline(remaining_ms: int) -> asyncio.Timeout:
    """`async with deadline(ms)` raises TimeoutError when the time is over; 0 is no limit.

    Time left travels, never the time of day: clocks of two hosts differ.
    """
    return asyncio.timeout(remaining_ms / 1000 if remaining_ms else None)
