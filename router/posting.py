"""The short way of a POST: from the gate to its exchange, past what FastAPI does for endpoints.

Exchanges read their bodies by themselves and have no parameters; routing, dependencies and exit
stacks would do nothing for them, and take longer than picking workers. FastAPI has routes for them
too, for its document and for other methods; none of them is ever followed.
"""

from collections.abc import Callable, Mapping

from fastapi import FastAPI, Request
from pydantic import BaseModel
from starlette.types import ASGIApp, Receive, Scope, Send

from router.error_answers import response_of
from router.errors import ApiError
from router.exchange import Exchange
from router.openapi import answers

Endpoint = Callable[[Request], Exchange]


class Posts:
    """ASGI middleware, the innermost."""

    def __init__(self, app: ASGIApp, endpoints: Mapping[str, Endpoint]) -> None:
        """`endpoints`: by path."""
        self._app = app
        self._endpoints = endpoints

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        endpoint = self._endpoints.get(scope["path"]) if scope["type"] == "http" else None
        if endpoint is None or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        try:
            await endpoint(Request(scope))(scope, receive, send)
        except ApiError as error:  # before the first byte: an exchange raises none after it
            await response_of(error)(scope, receive, send)


def add_posts(
    app: FastAPI, endpoints: Mapping[str, Endpoint], answer_of: Mapping[str, type[BaseModel]]
) -> None:
    """To be added before any other middleware. Both by path."""
    app.add_middleware(Posts, endpoints=endpoints)
    for path, endpoint in endpoints.items():
        app.post(path, response_model=None, responses=answers(answer_of[path]))(endpoint)
