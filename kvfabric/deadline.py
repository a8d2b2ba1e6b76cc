"""Waiting for something outside the process, with a deadline and without ending it."""

import asyncio
import logging
from typing import TypeVar

from kvfabric.errors import DeadlineExceeded

_logger = logging.getLogger(__name__)

T = TypeVar("T")


async def within(seconds: float, future: asyncio.Future[T], what: str) -> T:
    """The future's result; `DeadlineExceeded` if it takes longer. Neither the deadline nor a
    cancelled wait touches the future: whoever posted the operation still owns its end."""
    await asyncio.wait((future,), timeout=seconds)
    if not future.done():
        raise DeadlineExceeded(f"{what} took longer than {seconds:g} s")
    return future.result()


async def settled(future: asyncio.Future[None], seconds: float) -> bool:
    """Whether an operation is over, however it ended, so that its buffer may be used again.

    The connection is aborted or the operation done when this is called, so it takes no time. If
    it still is not over, its buffer must be given up: the transport may write into it later.
    """
    if not future.done():
        await asyncio.wait((future,), timeout=seconds)
    if not future.done():
        _logger.error("the transport keeps a buffer; its slot is retired")
    return future.done()
