"""One POST from its body to the last byte, whatever happens to the client meanwhile.

1. The body is read: JSON, bounded in size and time.
2. The answer is worked out and sent while the connection is watched: a client that leaves is
   noticed at once, not at the next send, and all its work is cancelled and awaited.
3. An error before the first byte is answered with its status; after it, it is the last event of
   the stream. A client that takes nothing any more is left.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Any

from pydantic_core import from_json
from starlette.types import Message, Receive, Scope, Send

from router.body import Connection, connection_of
from router.errors import (
    CLIENT_CLOSED_REQUEST,
    ApiError,
    BadRequest,
    Disconnected,
    InternalError,
)
from router.metrics import RouterMetrics
from router.record import RequestRecord
from router.sse import event
from router.tasks import cancel_and_wait
from router.tokenizer import JSONObject
from runtime.log import get_logger

log = get_logger()


class Reply:
    """What goes back to the client: one JSON document, or a stream of server-sent events.

    The last of it is kept until `end`: by then the request is counted, so that who has an answer
    also finds it in the metrics.
    """

    def __init__(
        self,
        send: Send,
        timeout_s: float,
        record: RequestRecord,
        connection: Connection | None = None,
    ) -> None:
        self.is_streaming = False
        self._connection = connection
        self._record = record
        self._send = send
        self._timeout_s = timeout_s
        self._last = b""

    def json(self, document: str) -> None:
        """The whole reply."""
        assert not self.is_streaming
        self._last = document.encode()

    async def events(self, events: bytes) -> None:
        """Whole ones (router/sse.py)."""
        if not self.is_streaming:
            self.is_streaming = True
            await self._start((b"content-type", b"text/event-stream; charset=utf-8"))
            self._record.answering()
        if self._connection is None or not self._connection.take_chunk(events):
            await self._write(events, more_body=True)

    def last_event(self, json: str) -> None:
        assert self.is_streaming
        self._last = event(json)

    async def end(self) -> None:
        if not self.is_streaming:
            length = str(len(self._last)).encode()
            await self._start((b"content-type", b"application/json"), (b"content-length", length))
            self._record.answering()
        await self._write(self._last, more_body=False)

    async def _start(self, *headers: tuple[bytes, bytes]) -> None:
        # nginx would collect events, and caches have no business here.
        headers = (*headers, (b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no"))
        await self._put(
            {"type": "http.response.start", "status": HTTPStatus.OK, "headers": headers}
        )

    async def _write(self, body: bytes, *, more_body: bool) -> None:
        await self._put({"type": "http.response.body", "body": body, "more_body": more_body})

    async def _put(self, message: Message) -> None:
        if self._connection is not None and self._connection.is_writable:
            await self._send(message)  # at once: no need for a timer
        else:
            await send_in_time(self._send, message, self._timeout_s, self._connection)


async def send_in_time(
    send: Send, message: Message, timeout_s: float, connection: Connection | None
) -> None:
    """Raises Disconnected if the client has not taken it by then; its connection is left."""
    try:
        async with asyncio.timeout(timeout_s):
            await send(message)
    except (TimeoutError, OSError) as error:
        if connection is not None:
            connection.leave()
        raise Disconnected("the client takes nothing any more") from error


Answer = Callable[[JSONObject, Reply], Coroutine[Any, Any, None]]


class Exchange:
    """Answers a POST with `answer(body, reply)`. An ASGI app, for this one."""

    def __init__(
        self,
        answer: Answer,
        metrics: RouterMetrics,
        record: RequestRecord,
        *,
        max_body_nbytes: int,
        body_timeout_s: float,
        send_timeout_s: float,
    ) -> None:
        self._answer = answer
        self._metrics = metrics
        self._record = record
        self._max_body_nbytes = max_body_nbytes
        self._body_timeout_s = body_timeout_s
        self._send_timeout_s = send_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        reply = Reply(send, self._send_timeout_s, self._record, connection_of(scope))
        try:
            async with _errors_told(reply, self._record.request_id):
                with self._metrics.track_request(self._record):
                    body = await self._read_json(scope, receive)
                    self._record.read()
                    await while_connected(receive, self._answer(body, reply))
            await reply.end()
        except Disconnected:
            log.info("client left", status=CLIENT_CLOSED_REQUEST)

    async def _read_json(self, scope: Scope, receive: Receive) -> JSONObject:
        _check_content_type(dict(scope["headers"]).get(b"content-type", b"").decode("latin-1"))
        try:
            async with asyncio.timeout(self._body_timeout_s):
                raw = await self._read_body(receive)
        except TimeoutError as error:
            text = f"The body did not come within {self._body_timeout_s:g} s."
            # What comes yet is no request: the connection cannot be used again.
            headers = {"Connection": "close"}
            raise ApiError(HTTPStatus.REQUEST_TIMEOUT, text, headers=headers) from error
        try:
            body = from_json(raw, allow_inf_nan=False)
        except ValueError as error:
            raise BadRequest(f"The body is not valid JSON: {error}.") from error
        if not isinstance(body, dict):
            raise BadRequest("The body must be a JSON object.")
        return body

    async def _read_body(self, receive: Receive) -> bytes:
        body = bytearray()
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise Disconnected("the client left while sending")
            body += message.get("body", b"")
            if len(body) > self._max_body_nbytes:
                text = f"The body is larger than {self._max_body_nbytes} bytes."
                # The server throws the rest away as it comes, for as long as a head may take: who
                # closes before a client is through with sending takes this answer from it.
                raise ApiError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, text)
            if not message.get("more_body", False):
                return bytes(body)


@asynccontextmanager
async def _errors_told(reply: Reply, request_id: str) -> AsyncIterator[None]:
    """Errors after the first byte become the last event; others are for the app's handlers."""
    try:
        yield
    except Disconnected:
        raise
    except Exception as error:
        if not isinstance(error, ApiError):
            log.error("request failed", exc_info=error)
            error = InternalError(request_id)
        if not reply.is_streaming:
            raise error from None
        reply.last_event(error.body())


async def while_connected(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Runs `work` to its end, or to the client's. Raises what it raises, or Disconnected."""
    working = asyncio.create_task(work)
    watching = asyncio.create_task(_disconnect(receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise Disconnected("the client left")
        working.result()
    finally:
        await cancel_and_wait(working, watching)


async def _disconnect(receive: Callable[[], Awaitable[Message]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        continue


def _check_content_type(content_type: str) -> None:
    """JSON must say so, if anything is said at all: a form is a mistake worth telling."""
    kind = content_type.partition(";")[0].strip().lower()
    if kind not in ("", "application/json"):
        text = f"Content-Type is {kind!r}; send application/json."
        raise ApiError(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, text)
