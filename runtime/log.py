"""One line per event on stderr: key=value for people, JSON for machines.

1. A process calls `configure` once, first thing in its `__main__`.
2. Modules hold `log = get_logger()` and say `log.info("worker ready", port=port)`.
3. A handler of a request wraps itself in `bind_request`: every line below it, in the same task,
   then carries the request id.

What libraries say through `logging` takes the same way out. A traceback stays within its line.
"""

import logging
import sys
from contextlib import AbstractContextManager
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
