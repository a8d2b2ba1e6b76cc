"""`GET /v1/requests` and `GET /v1/requests/{id}`: what became of the last requests, and why."""

import time
from collections.abc import Callable
from http import HTTPStatus

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from router.errors import ApiError, BadRequest
from router.explain import brief, explain
from router.explanation import RequestList
from router.perfetto import trace
from router.record import TenantRecords

FORMATS = ("json", "perfetto")


def add_requests(app: FastAPI, records_of: Callable[[Request], TenantRecords]) -> None:
    @app.get("/v1/requests")
    async def requests(request: Request) -> Response:
        """The newest first."""
        briefs = [brief(record) for record in records_of(request).newest_first()]
        return _json(RequestList(data=briefs).model_dump_json())

    @app.get("/v1/requests/{request_id}")
    async def one_request(request: Request, request_id: str) -> Response:
        wanted = request.query_params.get("format", "json")
        if wanted not in FORMATS:
            text = f"'format' is {wanted!r}; it must be one of {', '.join(FORMATS)}."
            raise BadRequest(text, param="format")
        record = records_of(request).get(request_id)
        if record is None:
            raise RequestNotFound(request_id)
        told = explain(record, time.monotonic_ns())
        if wanted == "perfetto":
            return JSONResponse(trace(told))
        return _json(told.model_dump_json())


class RequestNotFound(ApiError):
    def __init__(self, request_id: str) -> None:
        super().__init__(
            HTTPStatus.NOT_FOUND,
            f"No request {request_id[:100]!r} is known; the last ones are (--explain-requests).",
            param="request_id",
            code="request_not_found",
        )


def _json(document: str) -> Response:
    return Response(document, media_type="application/json")
