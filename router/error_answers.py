"""What a client hears when something goes wrong: OpenAI's error object, whatever it was.

No path, a wrong method, a bug of ours: none is answered in the words of the framework.
"""

from http import HTTPStatus

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.routing import Match, Route

from router.errors import ApiError, BadRequest, InternalError
from router.request_id import HEADER, request_id_of

MAX_PATH = 200
"""Characters of a path that an error repeats."""


def add_error_answers(app: FastAPI) -> None:
    app.add_exception_handler(ApiError, _on_api_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(RequestValidationError, _on_invalid)
    app.add_exception_handler(Exception, _on_bug)


async def _on_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return response_of(error)


def response_of(error: ApiError) -> Response:
    return Response(error.body(), error.status, error.headers, "application/json")


async def _on_http_exception(request: Request, error: Exception) -> Response:
    """No such path, or not with this method."""
    assert isinstance(error, HTTPException)
    text = f"{request.method} {request.url.path[:MAX_PATH]}: {error.detail}."
    headers = dict(error.headers or {})
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        headers["Allow"] = ", ".join(sorted(_methods(request)))
    return await _on_api_error(request, ApiError(error.status_code, text, headers=headers))


def _methods(request: Request) -> set[str]:
    """That the path has: a route knows only its own."""
    found: set[str] = set()
    for route in request.app.routes:
        if isinstance(route, Route) and route.matches(request.scope)[0] is not Match.NONE:
            found |= route.methods or set()
    return found


async def _on_invalid(request: Request, error: Exception) -> Response:
    """A parameter of the path or of the query."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    param = str(first["loc"][-1])
    return await _on_api_error(
        request, BadRequest(f"Invalid value for {param!r}: {first['msg']}.", param=param)
    )


async def _on_bug(request: Request, error: Exception) -> Response:
    """Answered outside of all middleware, so that the id is put there by hand."""
    request_id = request_id_of(request.scope)
    failure = InternalError(request_id)
    failure.headers[HEADER] = request_id
    return await _on_api_error(request, failure)
