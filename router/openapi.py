"""Our own OpenAPI document, `GET /openapi.json`: what is taken, and every way it may be answered.

FastAPI writes it from the routes and their response models; what it cannot know is added here:

1. Bodies and events, which endpoints read and send by themselves (router/exchange.py). A parameter
   may be null wherever it may be missing, and one that is not supported may say what asks for
   nothing.
2. Errors: of which statuses, and that all of them are OpenAI's error object.
"""

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, NamedTuple

from fastapi import FastAPI
from pydantic import BaseModel

from router.gate import is_open
from router.limits import Limits
from router.unsupported import UNSUPPORTED

Json = dict[str, Any]


class Posted(NamedTuple):
    """What is posted to a path, the answer, and the events by which it may be given."""

    body: type[BaseModel]
    answer: type[BaseModel]
    chunk: type[BaseModel] | None = None


Posts = Mapping[str, Posted]
"""By path."""

REF = "#/components/schemas/"

_ANY_TIME = {
    HTTPStatus.BAD_REQUEST: "The request is not understood, or asks for what cannot be done.",
    HTTPStatus.NOT_FOUND: "There is no such model, or no such thing.",
    HTTPStatus.SERVICE_UNAVAILABLE: "Not just now; Retry-After says when to ask again.",
    HTTPStatus.INTERNAL_SERVER_ERROR: "A bug; the message has the id under which the log tells it.",
}
_WITHOUT_KEY = {HTTPStatus.UNAUTHORIZED: "This router has keys, and none of them came."}
_OF_POSTS = {
    HTTPStatus.REQUEST_TIMEOUT: "The body did not come in time.",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "The body is too large.",
    HTTPStatus.UNSUPPORTED_MEDIA_TYPE: "The body is of another type than application/json.",
    HTTPStatus.TOO_MANY_REQUESTS: "Too much is asked for just now; Retry-After says when to ask.",
    HTTPStatus.GATEWAY_TIMEOUT: "The answer was not finished in time.",
}


class ErrorObject(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(BaseModel):
    error: ErrorObject


def answers(model: type[BaseModel]) -> dict[int | str, Json]:
    """For a route's `responses`: this one with 200."""
    return {HTTPStatus.OK.value: {"model": model, "description": "The answer."}}


def texts(media_type: str) -> dict[int | str, Json]:
    """For a route's `responses`: text of that type, with 200."""
    content = {media_type: {"schema": {"type": "string"}}}
    return {HTTPStatus.OK.value: {"description": "The answer.", "content": content}}


def add_document(app: FastAPI, posts: Posts, model: str, limits: Limits) -> None:
    """Has `app.openapi()` give the document. `model` and `limits` are what this router allows."""
    of_routes = app.openapi

    def openapi() -> Json:
        if app.openapi_schema is None:
            app.openapi_schema = _complete(of_routes(), posts, model, limits)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _complete(document: Json, posts: Posts, model: str, limits: Limits) -> Json:
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    for name in ("HTTPValidationError", "ValidationError"):  # FastAPI's own, which nobody gets
        schemas.pop(name, None)
    _define(schemas, ErrorResponse)
    for path, (body, _, chunk) in posts.items():
        _define(schemas, body)
        _loosen(schemas[body.__name__])
        _bound(schemas[body.__name__], model, limits)
        operation = document["paths"][path]["post"]
        content = _json({"$ref": REF + body.__name__})
        operation["requestBody"] = {"required": True, "content": content}
        if chunk is not None:
            _define(schemas, chunk)
            operation["responses"]["200"]["content"]["text/event-stream"] = _events(chunk)
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            errors = dict(_ANY_TIME)
            if not is_open(path):
                errors |= _WITHOUT_KEY
            if method == "post":
                errors |= _OF_POSTS
            _add_errors(operation["responses"], errors)
    return document


def _events(chunk: type[BaseModel]) -> Json:
    """Of a stream: each is a chunk or, as the last, an error or the word [DONE]."""
    parts = [{"$ref": REF + chunk.__name__}, {"$ref": f"{REF}ErrorResponse"}]
    document = {"contentMediaType": "application/json", "contentSchema": {"anyOf": parts}}
    data = {"type": "string", "anyOf": [{"const": "[DONE]"}, document]}
    return {"itemSchema": {"type": "object", "required": ["data"], "properties": {"data": data}}}


def _define(schemas: Json, model: type[BaseModel]) -> None:
    schema = model.model_json_schema(ref_template=REF + "{model}")
    schemas.update(schema.pop("$defs", {}))
    schemas[model.__name__] = schema


def _loosen(schema: Json) -> None:
    """What may be missing may be null, and what is not supported may ask for nothing."""
    properties, required = schema["properties"], schema.get("required", [])
    for name in properties:
        if name not in required:
            properties[name] = _nullable(properties[name])
    for name, nothing in UNSUPPORTED.items():
        if name not in properties:
            text = "Not supported but for values that ask for nothing."
            properties[name] = {"enum": [None, *nothing], "description": text}


def _nullable(schema: Json) -> Json:
    parts = schema.get("anyOf", [{k: v for k, v in schema.items() if k != "default"}])
    if {"type": "null"} in parts:
        return schema
    default = {"default": schema["default"]} if "default" in schema else {}
    return {"anyOf": [*parts, {"type": "null"}], **default}


def _bound(schema: Json, model: str, limits: Limits) -> None:
    """What this router has and allows, where JSON Schema has a word for it."""
    properties = schema["properties"]
    for part in _alternatives(properties["model"]):
        if part.get("type") == "string":
            part["enum"] = [model]
    for name, kind, word, most in (
        ("messages", "array", "maxItems", limits.max_messages),
        ("stop", "array", "maxItems", limits.max_stops),
        ("logprobs", "integer", "maximum", limits.max_logprobs),
        ("top_logprobs", "integer", "maximum", limits.max_logprobs),
        ("prompt_logprobs", "integer", "maximum", limits.max_logprobs),
    ):
        for part in _alternatives(properties.get(name, {})):
            if part.get("type") == kind:
                part[word] = min(most, part.get(word, most))
    for part in _alternatives(properties.get("prompt", {})):
        if part.get("type") == "array":
            part["minItems"] = 1
            if part["items"].get("type") != "integer":
                part["maxItems"] = limits.max_prompts


def _alternatives(schema: Json) -> list[Json]:
    return [schema, *schema.get("anyOf", [])]


def _add_errors(responses: Json, errors: Mapping[HTTPStatus, str]) -> None:
    responses.pop(str(HTTPStatus.UNPROCESSABLE_ENTITY.value), None)  # FastAPI's word for our 400
    for status, text in errors.items():
        error = {"description": text, "content": _json({"$ref": f"{REF}ErrorResponse"})}
        responses.setdefault(str(status.value), error)


def _json(schema: Json) -> Json:
    return {"application/json": {"schema": schema}}
