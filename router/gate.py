"""Lets in who has a key. ASGI middleware in front of everything but what probes and scrapers ask.

The key is in `Authorization: Bearer …`, as OpenAI's clients send it. It goes no further than here:
what requests carry on is whose it is. Answers to it tell what the key may still take.
"""

import time
from http import HTTPStatus

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router.admission import Admission
from router.error_answers import response_of
from router.errors import ApiError
from router.tenant import EVERYBODY, Grant

OPEN = ("/healthz", "/readyz", "/health", "/metrics", "/version", "/openapi.json", "/")
"""For whoever comes: they tell nothing of anybody's requests."""
PAGE = "/page/"
"""Files of the page (router/page.py), open as well; what it shows it asks for with a key."""
OPERATORS = ("/v1/ledger", "/v1/cluster")
"""And what is below: they tell of everybody's."""
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


class NotForTenants(ApiError):
    def __init__(self) -> None:
        text = "This key is not an operator's: it may not see what other tenants do."
        super().__init__(HTTPStatus.FORBIDDEN, text, code="insufficient_permissions")


class Gate:
    """See the module."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or is_open(scope["path"]):
            await self._app(scope, receive, send)
            return
        admission: Admission = scope["app"].state.router.admission
        told = Headers(scope=scope).getlist("authorization")
        # Of two, somebody on the way may have looked at the other one.
        grant = admission.keys.find(told[0] if told else "") if len(told) < 2 else None
        if grant is None:
            admission.metrics.refused("invalid_api_key")
            await response_of(InvalidKey(is_missing=not told))(scope, receive, send)
            return
        if not grant.is_operator and scope["path"].startswith(OPERATORS):
            await response_of(NotForTenants())(scope, receive, send)
            return
        scope[_KEY] = grant

        async def send_told(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in admission.limits.headers(grant, time.monotonic()):
                    headers.raw.append((name, value))
            await send(message)

        await self._app(scope, receive, send_told)


def is_open(path: str) -> bool:
    """Without a key."""
    return path in OPEN or path.startswith(PAGE)


def grant_of(scope: Scope) -> Grant:
    grant = scope.get(_KEY, EVERYBODY)
    assert isinstance(grant, Grant)
    return grant
