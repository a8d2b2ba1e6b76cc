"""HTTP connections on which a request's head must come in time, and the end of an answer go.

uvicorn bounds how long a connection is idle between requests, and the app how long a body takes;
nobody bounds a head that trickles in, or what comes after an answer and belongs to no request. Here
a connection has a given time from its beginning, or from the first byte after an answer, until a
request has begun. Then it is told 408, if it has said anything, and closed.

Nor does anybody look after what is written and not taken: who answers waits for room, and a
connection with its end until all is gone. A client that takes none of it is left.

What is no HTTP, or has too long a head, is told so in OpenAI's format, as everything else is.
"""

import asyncio
from http import HTTPStatus
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from router.body import CONNECTION
from router.errors import ApiError
from router.joined_writes import JoinedWrites

MAX_HEAD_NBYTES = 64 << 10


class TimedConfig(uvicorn.Config):
    """uvicorn's own, the time for a head, and that after which who takes nothing is left."""

    def __init__(
        self, app: Any, *, head_timeout_s: float, send_timeout_s: float, **settings: Any
    ) -> None:
        super().__init__(
            app,
            http=TimedConnection,
            ws="none",
            h11_max_incomplete_event_size=MAX_HEAD_NBYTES,
            **settings,
        )
        self.head_timeout_s = head_timeout_s
        self.send_timeout_s = send_timeout_s


class TimedConnection(H11Protocol):
    """One connection. What handles its requests finds it in the scope's state (router/body.py)."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.app_state = {**self.app_state, CONNECTION: self}
        self.conn: JoinedWrites = JoinedWrites(MAX_HEAD_NBYTES, self.loop, self._flush)
        assert isinstance(self.config, TimedConfig)
        self._timeout_s = self.config.head_timeout_s
        self._send_timeout_s = self.config.send_timeout_s
        self._deadline: asyncio.TimerHandle | None = None
        self._taking: asyncio.TimerHandle | None = None
        self._expect_head()

    def data_received(self, data: bytes) -> None:
        if self._is_idle:
            self._expect_head()
        super().data_received(data)
        if not self._is_idle:
            self._head_is_here()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._expect_taking()
        if self._is_idle and self.conn.trailing_data[0]:
            self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_is_here()
        if self._taking is not None:
            self._taking.cancel()
        super().connection_lost(exc)

    def take_chunk(self, body: bytes) -> bool:
        """See `router.body.Connection`. As h11 would write it, which need not know: its state does
        not change within a body."""
        cycle = self.cycle
        is_body = cycle.response_started and not cycle.response_complete and not cycle.disconnected
        has_chunks = self.conn.our_state is h11.SEND_BODY and self.scope["http_version"] == "1.1"
        if not (is_body and has_chunks and body) or self.flow.write_paused:
            return False
        self.transport.write(b"%b%x\r\n%b\r\n" % (self.conn.take(), len(body), body))
        return True

    def leave(self) -> None:
        self.transport.abort()

    @property
    def is_writable(self) -> bool:
        return not self.flow.write_paused

    def _flush(self) -> None:
        if not self.transport.is_closing():
            self.transport.write(self.conn.take())

    @property
    def _is_idle(self) -> bool:
        """No request is being answered."""
        return self.cycle is None or self.cycle.response_complete

    def _expect_head(self) -> None:
        if self._deadline is None:
            self._deadline = self.loop.call_later(self._timeout_s, self._give_up)

    def _head_is_here(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def pause_writing(self) -> None:
        super().pause_writing()
        self._expect_taking()

    def _expect_taking(self) -> None:
        """Of what is written: nothing is added to it until there is room, or another request."""
        if self._taking is not None:
            self._taking.cancel()
            self._taking = None
        if left := self.transport.get_write_buffer_size():
            self._taking = self.loop.call_later(self._send_timeout_s, self._look, left)

    def _look(self, left: int) -> None:
        self._taking = None
        if not (self._is_idle or self.flow.write_paused):
            return  # there is room again
        if self.transport.get_write_buffer_size() < left:
            self._expect_taking()
        else:
            self.transport.abort()

    def _give_up(self) -> None:
        if self.transport.is_closing():
            return
        if self.conn.our_state is h11.IDLE and self.conn.trailing_data[0]:
            text = f"The head of the request did not come within {self._timeout_s:g} s."
            self._answer(ApiError(HTTPStatus.REQUEST_TIMEOUT, text))
        self.transport.close()

    def send_400_response(self, msg: str) -> None:
        """uvicorn's way out for what h11 refuses: no HTTP, or a head that is too long."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):  # else an answer is under way
            error = ApiError(HTTPStatus.BAD_REQUEST, msg)
            if len(self.conn.trailing_data[0]) > MAX_HEAD_NBYTES:
                text = f"The head of the request is longer than {MAX_HEAD_NBYTES} bytes."
                error = ApiError(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, text)
            self._answer(error)
        self.transport.close()

    def _answer(self, error: ApiError) -> None:
        body = error.body().encode()
        headers = [
            ("content-type", "application/json"),
            ("content-length", str(len(body))),
            ("connection", "close"),
        ]
        reason = HTTPStatus(error.status).phrase.encode()
        response = h11.Response(status_code=error.status, headers=headers, reason=reason)
        for event in (response, h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self._expect_taking()
