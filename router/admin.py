"""The admin API: which workers there are, and what they shall do. On a port of its own.

Every request must bear the token (`Authorization: Bearer …`), which is compared in constant time.

    GET    /admin/workers                      all that this router knows
    POST   /admin/workers {address}            joins; nothing happens if it is there already
    DELETE /admin/workers/{worker}             this router forgets it; what runs there ends there
    POST   /admin/workers/{worker}/roles {roles, grace_s}
                                               serves these from now on; none: it drains
    …      /admin/pins                         prefixes that stay cached: router/pins_api.py

`{worker}` is a name or an address. Roles are said to the worker itself, so that all routers hear of
them from it; who joins or leaves is said to each router.
"""

import hashlib
import hmac
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Annotated, Literal

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict, Field, StringConstraints
from starlette.exceptions import HTTPException

from router.errors import ApiError, BadRequest, LegFailed
from router.fleet import Fleet, Member, NoSuchWorker
from router.pins import PinBoard
from router.pins_api import ReadPrompt, add_pins
from runtime.log import get_logger

log = get_logger()

Role = Literal["prefill", "decode"]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Join(_Body):
    address: Annotated[
        str, StringConstraints(pattern=r"^(\[[0-9a-fA-F:.]+\]|[^\s:/\[\]]+):\d{1,5}$")
    ]


class Roles(_Body):
    roles: list[Role]
    grace_s: float = Field(30.0, ge=0, le=86_400)


class Listed(BaseModel):
    workers: list[Member]


def build_admin(fleet: Fleet, pins: PinBoard, read_prompt: ReadPrompt, token: str) -> FastAPI:
    """`token` must not be empty."""
    assert token
    expected = hashlib.sha256(token.encode()).digest()
    app = FastAPI(openapi_url=None, title="Baton admin")

    @app.middleware("http")
    async def check_token(
        request: Request, call_next: Callable[[Request], Awaitable[Response]]
    ) -> Response:
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        # Hashes of equal length: the time tells nothing of the token, its length neither.
        is_right = hmac.compare_digest(hashlib.sha256(given.strip().encode()).digest(), expected)
        if scheme.lower() != "bearer" or not is_right:
            return _answer(_Unauthorized())
        return await call_next(request)

    app.add_exception_handler(ApiError, _on_api_error)
    app.add_exception_handler(RequestValidationError, _on_invalid)
    app.add_exception_handler(HTTPException, _on_http_exception)
    _add_workers(app, fleet)
    add_pins(app, pins, read_prompt)
    return app


def _add_workers(app: FastAPI, fleet: Fleet) -> None:
    @app.get("/admin/workers")
    async def listed() -> Listed:
        return Listed(workers=fleet.members())

    @app.post("/admin/workers")
    async def join(body: Join) -> Listed:
        fleet.add(body.address)
        return Listed(workers=fleet.members())

    @app.delete("/admin/workers/{worker}")
    async def leave(worker: str) -> Listed:
        _found(fleet, worker)
        fleet.remove(worker)
        return Listed(workers=fleet.members())

    @app.post("/admin/workers/{worker}/roles")
    async def roles(worker: str, body: Roles) -> Member:
        _found(fleet, worker)
        try:
            return await fleet.assign(worker, body.roles, body.grace_s)
        except LegFailed as failure:
            text = f"The worker did not take its roles: {failure}. {failure.detail}".strip()
            raise ApiError(HTTPStatus.BAD_GATEWAY, text, code="worker_failed") from failure


def _found(fleet: Fleet, worker: str) -> None:
    try:
        fleet.member(worker)
    except NoSuchWorker as error:
        raise ApiError(HTTPStatus.NOT_FOUND, str(error), param="worker") from error


class _Unauthorized(ApiError):
    def __init__(self) -> None:
        super().__init__(
            HTTPStatus.UNAUTHORIZED,
            "The admin token is missing or wrong: send 'Authorization: Bearer TOKEN'.",
            code="invalid_admin_token",
            headers={"WWW-Authenticate": "Bearer"},
        )


def _answer(error: ApiError) -> Response:
    return Response(error.body(), error.status, error.headers, "application/json")


async def _on_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return _answer(error)


async def _on_invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    param = ".".join(str(part) for part in first["loc"][1:])
    return _answer(BadRequest(f"{param or 'The body'}: {first['msg']}.", param=param or None))


async def _on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    text = f"{request.method} {request.url.path}: {error.detail}"
    return _answer(ApiError(error.status_code, text, headers=dict(error.headers or {})))
