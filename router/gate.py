"""Lets in who has a key. ASGI middleware in front of everything under `/v1/`.

The key is in `Authorization: Bearer …`, as OpenAI's clients send it. It goes no further than here:
what requests carry on is whose it is. Answers to it tell what the key may still take.
"""

import time
from http import HTTPStatus

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router.admission import Admission
from router.errors import ApiError
from router.tenant import EVERYBODY, Grant

GUARDED = ("/v1/", "/tokenize", "/detokenize")
"""Beginnings of paths."""
_KEY = "baton.grant"


class InvalidKey(ApiError):
    def __init__(self, *, is_missing: bool) -> None:
        text = "No API key came with the request" if is_missing else "The API key is not known here"
        super().__init__(
            HTTPStatus.UNAUTHORIZED,
            f"{text}: send 'Authorization: Bearer KEY'.",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )


class Gate:
    """See the module."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].startswith(GUARDED):
            await self._app(scope, receive, send)
            return
        admission: Admission = scope["app"].state.router.admission
        told = Headers(scope=scope).getlist("authorization")
        # Of two, somebody on the way may have looked at the other one.
        grant = admission.keys.find(told[0] if told else "") if len(told) < 2 else None
        if grant is None:
            admission.metrics.refused("invalid_api_key")
            error = InvalidKey(is_missing=not told)
            response = Response(error.body(), error.status, error.headers, "application/json")
            await response(scope, receive, send)
            return
        scope[_KEY] = grant

        async def send_told(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in admission.limits.headers(grant, time.monotonic()):
                    headers.raw.append((name, value))
            await send(message)

        await self._app(scope, receive, send_told)


def grant_of(scope: Scope) -> Grant:
    grant = scope.get(_KEY, EVERYBODY)
    assert isinstance(grant, Grant)
    return grant
