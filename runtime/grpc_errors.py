"""Exceptions of handlers as gRPC status codes, in one place.

An `ErrorTable` names the status of each exception type; the most specific entry wins. What the
table does not know is a bug of ours: the client gets INTERNAL with an id, the log gets the
traceback under the same id. Cancellation and `context.abort` pass untouched. An exception that has
`trailing_metadata` sends it along.

A handler that is an async generator is closed as soon as its call ends, however it ends. Without
that it would wait for garbage collection, and what it holds with it: the stream is the lease.
"""

from __future__ import annotations

import asyncio
import inspect
import secrets
from collections.abc import Awaitable, Callable, Mapping
from contextlib import aclosing
from typing import Any, NoReturn

import grpc

from runtime.log import get_logger

log = get_logger()

ErrorTable = Mapping[type[Exception], grpc.StatusCode]

# A handler's request is a message or an iterator of messages, its reply likewise: grpc has no
# types for that, so `Any` is what crosses here.
_Handler = Callable[[Any, Any], Any]
_Context = grpc.aio.ServicerContext[Any, Any]

_MAX_DETAILS_LENGTH = 1024  # details travel in a trailer, and trailers are limited to 8 KiB


class ErrorTranslator(grpc.aio.ServerInterceptor):
    """Ends calls whose handler raised with the status that the table gives."""

    def __init__(self, table: ErrorTable) -> None:
        self._table = table
        self.calls: set[asyncio.Task[Any]] = set()
        """Tasks of the calls under way. A cancelled one stays until its handler has let go."""

    async def intercept_service(
        self,
        continuation: Callable[
            [grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]
        ],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None:  # no such method: grpc answers UNIMPLEMENTED
            return handler
        request = "stream" if handler.request_streaming else "unary"
        reply = "stream" if handler.response_streaming else "unary"
        behaviour: _Handler = getattr(handler, f"{request}_{reply}")
        wrap = self._stream if inspect.isasyncgenfunction(behaviour) else self._unary
        make = getattr(grpc, f"{request}_{reply}_rpc_method_handler")
        wrapped: grpc.RpcMethodHandler[Any, Any] = make(
            wrap(behaviour, method),
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )
        return wrapped

    def _unary(self, behaviour: _Handler, method: str) -> _Handler:
        async def call(request: Any, context: _Context) -> Any:
            self._count()
            try:
                return await behaviour(request, context)
            except Exception as error:  # noqa: BLE001 (the boundary)
                await self._fail(error, context, method)

        return call

    def _stream(self, behaviour: _Handler, method: str) -> _Handler:
        async def call(request: Any, context: _Context) -> None:
            self._count()
            try:
                async with aclosing(behaviour(request, context)) as replies:
                    async for reply in replies:
                        await context.write(reply)
            except Exception as error:  # noqa: BLE001 (the boundary)
                await self._fail(error, context, method)

        return call

    def _count(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.calls.add(task)
        task.add_done_callback(self.calls.discard)

    async def _fail(self, error: Exception, context: _Context, method: str) -> NoReturn:
        if isinstance(error, grpc.aio.AbortError) or context.done():
            raise error
        code = next((self._table[t] for t in type(error).__mro__ if t in self._table), None)
        if code is None:
            error_id = secrets.token_hex(4)
            log.error("handler failed", method=method, error_id=error_id, exc_info=error)
            await context.abort(grpc.StatusCode.INTERNAL, f"internal error {error_id}")
        metadata = getattr(error, "trailing_metadata", ())
        await context.abort(code, one_line(str(error) or type(error).__name__), metadata)
        raise AssertionError("abort always raises")


def one_line(text: str) -> str:
    """`text` fit for status details: no line breaks or control characters, and not too long."""
    printable = "".join(c if c.isprintable() else " " for c in text)
    return " ".join(printable.split())[:_MAX_DETAILS_LENGTH]
