"""What can go wrong, as a tree; `ApiError` is the only part of it a client ever sees.

RouterError
├── ApiError              ends the request with a status and a body in OpenAI's format
│   ├── BadRequest        400  the request asks for what cannot be done
│   ├── ModelNotFound     404
│   ├── NoWorkerReady     503  nobody there within the bounded wait
│   ├── WorkersFailed     503  every attempt failed
│   ├── NoRetryLeft       503  it failed, and so many do that it is not tried again
│   ├── CompilersBusy     503  others' grammars are being compiled
│   ├── TemplateOccupied  503  others' chats are being rendered
│   ├── TooManyRequests   429  refused at admission (router/admission.py), or
│   │   └── Overloaded             every prefill queue was full for too long
│   ├── ShuttingDown      503
│   ├── RequestTimedOut   504
│   └── InternalError     500  a bug of ours: the log has it, by the request's id
├── LegFailed             one call to a worker failed: dispatch tries another
├── QueueFull             a prefill worker has too much to do just now: no fault of it
├── Reopen                the decode leg is sound, but its stream cannot go on
└── Disconnected          the client is gone: there is nobody to tell
"""

import json
import math
from collections.abc import Mapping
from http import HTTPStatus

import grpc

from runtime.call import DRAINING, RETRY_AFTER_MS

CLIENT_CLOSED_REQUEST = 499
"""A client that left got no status; nginx's word for it stands in logs and records."""


class RouterError(Exception):
    """Root of what the router raises for clients and workers."""


class ApiError(RouterError):
    """An answer that is an error. Other statuses than the subclasses' come with it directly."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def body(self) -> str:
        """JSON, as OpenAI's `ErrorResponse`."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        if self.status == HTTPStatus.TOO_MANY_REQUESTS:
            kind = "rate_limit_error"
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return json.dumps({"error": error}, ensure_ascii=False)


class BadRequest(ApiError):
    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(HTTPStatus.BAD_REQUEST, message, param=param, code=code)


class ModelNotFound(ApiError):
    def __init__(self, name: str, served: str) -> None:
        super().__init__(
            HTTPStatus.NOT_FOUND,
            f"The model {name!r} does not exist; this server has {served!r}.",
            param="model",
            code="model_not_found",
        )


class _Unavailable(ApiError):
    def __init__(self, message: str, code: str) -> None:
        headers = {"Retry-After": "1"}
        super().__init__(HTTPStatus.SERVICE_UNAVAILABLE, message, code=code, headers=headers)


class NoWorkerReady(_Unavailable):
    def __init__(self, waited_s: float) -> None:
        super().__init__(f"No worker became ready within {waited_s:g} s.", "no_worker_ready")


class WorkersFailed(_Unavailable):
    def __init__(self, attempts: int, last: RouterError) -> None:
        super().__init__(f"All {attempts} attempts failed; the last one: {last}.", "workers_failed")


class NoRetryLeft(_Unavailable):
    def __init__(self, last: RouterError) -> None:
        text = f"Workers fail too often just now to try again; the last failure: {last}."
        super().__init__(text, "workers_failed")


class CompilersBusy(_Unavailable):
    def __init__(self, waited_s: float) -> None:
        text = f"No process was ready to compile the grammar within {waited_s:g} s."
        super().__init__(text, "compilers_busy")


class TemplateOccupied(_Unavailable):
    def __init__(self) -> None:
        super().__init__("Others' messages take too long to render.", "template_busy")


class ShuttingDown(_Unavailable):
    def __init__(self) -> None:
        super().__init__("The server is shutting down.", "shutting_down")


class TooManyRequests(ApiError):
    def __init__(self, text: str, retry_after_s: float) -> None:
        super().__init__(
            HTTPStatus.TOO_MANY_REQUESTS,
            f"{text}; try again in {retry_after_s:.1f} s.",
            code="rate_limit_exceeded",
            headers={"Retry-After": str(max(1, math.ceil(retry_after_s)))},
        )


class Overloaded(TooManyRequests):
    def __init__(self, waited_s: float, retry_after_s: float) -> None:
        text = f"The request waited {waited_s:g} s, and the queues of all prefill workers are full"
        super().__init__(text, retry_after_s)


class RequestTimedOut(ApiError):
    def __init__(self, timeout_s: float) -> None:
        super().__init__(
            HTTPStatus.GATEWAY_TIMEOUT,
            f"The request was not finished within {timeout_s:g} s.",
            code="timeout",
        )


class InternalError(ApiError):
    """What went wrong is for the log alone; the id finds it there."""

    def __init__(self, request_id: str) -> None:
        super().__init__(
            HTTPStatus.INTERNAL_SERVER_ERROR,
            f"Internal error. The server's log has it under request id {request_id}.",
            code="internal_error",
        )


class LegFailed(RouterError):
    """A call to `worker` failed. `reason` is a word for metrics and logs."""

    def __init__(self, worker: str, reason: str, detail: str = "") -> None:
        super().__init__(f"{worker}: {reason}")
        self.worker = worker
        self.reason = reason
        self.detail = detail

    @property
    def is_goodbye(self) -> bool:
        """The worker is well, and serves no such calls any more."""
        return self.reason == "draining"

    @property
    def is_worker_suspect(self) -> bool:
        """The worker itself may be gone, not only this call."""
        return self.reason in ("unavailable", "silent", "deadline_exceeded")


class QueueFull(RouterError):
    """A prefill worker refused: the request would wait too long. Nothing was begun."""

    def __init__(self, worker: str, retry_after_s: float) -> None:
        super().__init__(f"{worker}: queue_full")
        self.worker = worker
        self.retry_after_s = retry_after_s


class Reopen(RouterError):
    """Close this Generate stream and open another, with the tokens delivered so far."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Disconnected(RouterError):
    pass


def from_status(worker: str, error: grpc.aio.AioRpcError) -> RouterError:
    """What a status of a worker's call means to a request."""
    detail = error.details() or ""
    trailing = dict(error.trailing_metadata() or ())
    if DRAINING in trailing:
        return LegFailed(worker, "draining", detail)
    if error.code() is grpc.StatusCode.INVALID_ARGUMENT:
        return BadRequest(detail or "The request cannot be served.")
    if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
        retry_after_ms = trailing.get(RETRY_AFTER_MS)
        if retry_after_ms is not None:  # else grpc's own: a message too long, say
            return QueueFull(worker, int(retry_after_ms) / 1000)
    return LegFailed(worker, error.code().name.lower(), detail)
