"""One line per event on stderr: key=value for people, JSON for machines.

1. A process calls `configure` once, first thing in its `__main__`.
2. Modules hold `log = get_logger()` and say `log.info("worker ready", port=port)`.
3. A handler of a request wraps itself in `bind_request`, a worker's in `leg`: every line below it,
   in the same task, then carries the request id.

Levels: `error` is a bug of ours or a process that cannot go on; `warning` is what went wrong and
was survived, and somebody may want to look at; `info` is what happened, a line for each request in
each process; `debug` is for who works on the code. No line at any level holds a prompt, an answer
or a token id.

What libraries say through `logging` takes the same way out. A traceback stays within its line.
"""

import asyncio
import logging
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Literal

import structlog

Format = Literal["text", "json"]
Logger = structlog.stdlib.BoundLogger


def configure(process: str, *, format: Format = "text", level: str = "info") -> None:
    """Sets up logging for this process; `process` stands in every line."""
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
    ]
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        wrapper_class=structlog.stdlib.BoundLogger,
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                _named(process),
                _renderer(format),
            ],
        )
    )
    logging.basicConfig(handlers=[handler], level=level.upper(), force=True)


def get_logger() -> Logger:
    """A logger; it may be made before `configure` is called."""
    return structlog.stdlib.get_logger()


def bind_request(request_id: str) -> AbstractContextManager[None]:
    """Adds `request_id` to every line said inside, in this task and the tasks it starts."""
    return structlog.contextvars.bound_contextvars(request_id=request_id)


@contextmanager
def leg(kind: str, request_id: str, **facts: object) -> Iterator[None]:
    """A worker's part of a request, said in one line when it is over. The id stays with its task:
    what it raises is logged further out."""
    structlog.contextvars.bind_contextvars(request_id=request_id)
    began, outcome = time.monotonic(), "done"
    try:
        yield
    except BaseException as error:
        is_cancelled = isinstance(error, asyncio.CancelledError)
        outcome = "cancelled" if is_cancelled else type(error).__name__
        raise
    finally:
        seconds = round(time.monotonic() - began, 3)
        get_logger().info(f"{kind} ended", outcome=outcome, seconds=seconds, **facts)


def _renderer(format: Format) -> structlog.typing.Processor:
    if format == "json":
        return structlog.processors.JSONRenderer()
    return structlog.processors.LogfmtRenderer(
        key_order=["timestamp", "level", "process", "event"], bool_as_flag=False
    )


def _named(process: str) -> structlog.typing.Processor:
    def add(
        logger: object, method: str, event: structlog.typing.EventDict
    ) -> structlog.typing.EventDict:
        event["process"] = process
        return event

    return add
