"""`GET /v1/requests` and `GET /v1/requests/{id}`: what became of the last requests, and why."""

import time
from collections.abc import Callable
from http import HTTPStatus
from typing import Literal

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from router.errors import ApiError
from router.explain import brief, explain
from router.explanation import Explanation, RequestList
from router.openapi import answers
from router.perfetto import trace
from router.record import TenantRecords

Format = Literal["json", "perfetto"]

# Of a trace no more is said than that it is an object: its shape is Chrome's.
_FORMS = [{"$ref": "#/components/schemas/Explanation"}, {"type": "object"}]
ONE_REQUEST = {
    **answers(Explanation),
    "200": {"content": {"application/json": {"schema": {"anyOf": _FORMS}}}},
}


def add_requests(app: FastAPI, records_of: Callable[[Request], TenantRecords]) -> None:
    @app.get("/v1/requests", responses=answers(RequestList))
    async def requests(request: Request) -> Response:
        """The newest first."""
        briefs = [brief(record) for record in records_of(request).newest_first()]
        return _json(RequestList(data=briefs).model_dump_json())

    @app.get("/v1/requests/{request_id}", responses=ONE_REQUEST)
    async def one_request(request: Request, request_id: str, format: Format = "json") -> Response:
        record = records_of(request).get(request_id)
        if record is None:
            raise RequestNotFound(request_id)
        told = explain(record, time.monotonic_ns())
        if format == "perfetto":
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
