"""Answers of every kind held against the schemas that OpenAI publishes."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.router.conftest import RunningRouter, StartRouter
from tests.router.fake_workers import fake_cluster
from tests.router.openai_schemas import check_against_schemas, needs_schemas, without_nulls
from tests.router.test_app import events_of

USAGE = {"stream": True, "stream_options": {"include_usage": True}}
LOGPROBS = {"logprobs": True, "top_logprobs": 2}


@asynccontextmanager
async def router_over_fakes(
    start_router: StartRouter, answer: Sequence[int]
) -> AsyncIterator[RunningRouter]:
    async with fake_cluster(answer) as cluster, start_router(cluster) as router:
        yield router


@needs_schemas
@pytest.mark.parametrize("fields", [{}, {"n": 2}, LOGPROBS, {"n": 2, **LOGPROBS}], ids=str)
async def test_chats(
    start_router: StartRouter, answer: Sequence[int], fields: dict[str, Any]
) -> None:
    async with router_over_fakes(start_router, answer) as router:
        check_against_schemas(
            {"CreateChatCompletionResponse": [(await router.chat(**fields)).text]}
        )
        for options in ({"stream": True}, USAGE):
            *chunks, _ = events_of((await router.chat(**options, **fields)).text)
            check_against_schemas({"CreateChatCompletionStreamResponse": [*chunks]})


@needs_schemas
@pytest.mark.parametrize(
    "fields", [{}, {"n": 2}, {"logprobs": 2}, {"prompt": ["a", "b"]}, {"max_tokens": 1}], ids=str
)
async def test_completions(
    start_router: StartRouter, answer: Sequence[int], fields: dict[str, Any]
) -> None:
    async with router_over_fakes(start_router, answer) as router:
        check_against_schemas(
            {"CreateCompletionResponse": [(await router.complete(**fields)).text]}
        )
        for options in ({"stream": True}, USAGE):
            *chunks, _ = events_of((await router.complete(**options, **fields)).text)
            check_against_schemas({"CreateCompletionResponse": [*map(without_nulls, chunks)]})


@needs_schemas
async def test_errors_and_models(start_router: StartRouter) -> None:
    async with fake_cluster(()) as cluster:
        for worker in cluster.workers:
            await worker.kill()
        limits = {"ready_wait_s": 0.05, "max_body_nbytes": 1000}
        async with start_router(cluster, **limits) as router:
            http, path = router.http, "/v1/completions"
            errors = {
                400: await router.complete(temperature=9),
                404: await http.get("/v1/nowhere"),
                405: await http.get(path),
                413: await http.post(path, json={"model": "x" * 1000}),
                415: await http.post(path, data={"a": "b"}),
                503: await router.complete(),
            }
            for status, response in errors.items():
                assert response.status_code == status
                check_against_schemas({"ErrorResponse": [response.text]})
            check_against_schemas({"ListModelsResponse": [(await http.get("/v1/models")).text]})
            check_against_schemas({"Model": [(await http.get("/v1/models/tiny")).text]})
