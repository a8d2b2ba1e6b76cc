"""What is served beside completions: the model's name, health, metrics, and whose the memory is."""

import time
from collections.abc import Awaitable, Callable
from http import HTTPStatus

from fastapi import FastAPI, Request
from fastapi.responses import Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from router.answers import Model, ModelList, Status, Version
from router.errors import ModelNotFound
from router.ledger import Ledger
from router.openapi import answers, texts


def add_models(app: FastAPI, name: str) -> None:
    model = Model(id=name, created=int(time.time()))

    @app.head("/v1/models", include_in_schema=False)
    @app.get("/v1/models")
    async def models() -> ModelList:
        return ModelList(data=[model])

    @app.get("/v1/models/{model_id:path}")
    async def retrieve_model(model_id: str) -> Model:
        if model_id != name:
            raise ModelNotFound(model_id, name)
        return model


def add_operations(
    app: FastAPI,
    registry: CollectorRegistry,
    is_ready: Callable[[Request], bool],
    read_ledger: Callable[[Request], Awaitable[Ledger]],
) -> None:
    @app.head("/healthz", include_in_schema=False)
    @app.get("/healthz")
    async def alive() -> Status:
        return Status(status="alive")

    # `/health` is what clients of vLLM's ask before they begin.
    @app.head("/health", include_in_schema=False)
    @app.get("/health", responses={HTTPStatus.SERVICE_UNAVAILABLE: {"model": Status}})
    @app.head("/readyz", include_in_schema=False)
    @app.get("/readyz", responses={HTTPStatus.SERVICE_UNAVAILABLE: {"model": Status}})
    async def ready(request: Request, response: Response) -> Status:
        if is_ready(request):
            return Status(status="ready")
        response.status_code = HTTPStatus.SERVICE_UNAVAILABLE
        return Status(status="waiting for workers")

    @app.get("/version")
    async def version() -> Version:
        return Version.of_package()

    @app.get("/v1/ledger", responses=answers(Ledger))
    async def ledger(request: Request) -> Response:
        told = await read_ledger(request)
        return Response(told.model_dump_json(), media_type="application/json")

    @app.head("/metrics", include_in_schema=False)
    @app.get("/metrics", responses=texts("text/plain"), response_class=Response)
    async def metrics() -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)
