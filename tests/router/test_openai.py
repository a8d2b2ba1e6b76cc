"""OpenAI's own client and, where they are at hand, OpenAI's own schemas as the yardstick."""

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from tests.router.conftest import ANSWER, RunningRouter, StartRouter
from tests.router.fake_workers import fake_cluster
from tests.router.test_app import events_of

SCHEMAS = Path(__file__).parents[3] / "shared" / "openai" / "schemas.json"


@asynccontextmanager
async def openai_client(router: RunningRouter) -> AsyncIterator[openai.AsyncOpenAI]:
    client = openai.AsyncOpenAI(base_url=f"{router.url}/v1", api_key="none", max_retries=0)
    async with client:
        yield client


async def test_the_official_client(start_router: StartRouter, answer: Sequence[int]) -> None:
    async with (
        fake_cluster(answer) as cluster,
        start_router(cluster) as router,
        openai_client(router) as client,
    ):
        chat = await client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "Capital of France?"}],
            seed=7,
            extra_body={"top_k": 5},
        )
        assert chat.choices[0].message.content == ANSWER
        assert cluster.decodes[0].requests[0].sampling.seed == 7
        assert cluster.decodes[0].requests[0].sampling.top_k == 5

        text = ""
        stream = await client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "Capital of France?"}],
            stream=True,
            stream_options={"include_usage": True},
        )
        async for chunk in stream:
            text += chunk.choices[0].delta.content or "" if chunk.choices else ""
        assert text == ANSWER
        assert chunk.usage is not None
        assert chunk.usage.completion_tokens == len(answer)

        completion = await client.completions.create(model="tiny", prompt=["a", "b"], max_tokens=40)
        assert [choice.text for choice in completion.choices] == [ANSWER, ANSWER]
        assert [model.id async for model in client.models.list()] == ["tiny"]


async def test_the_official_client_understands_errors(start_router: StartRouter) -> None:
    async with (
        fake_cluster(()) as cluster,
        start_router(cluster) as router,
        openai_client(router) as client,
    ):
        with pytest.raises(openai.BadRequestError) as refusal:
            await client.chat.completions.create(
                model="tiny", messages=[{"role": "user", "content": "Hi"}], store=True
            )
        assert (refusal.value.param, refusal.value.code) == ("store", "unsupported_parameter")
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("gpt-4")


async def test_answers_are_what_openais_types_say(
    start_router: StartRouter, answer: Sequence[int]
) -> None:
    async with fake_cluster(answer) as cluster, start_router(cluster) as router:
        options = {"stream": True, "stream_options": {"include_usage": True}}
        chat = (await router.chat()).text
        chunks = events_of((await router.chat(**options)).text)[:-1]
        text = (await router.complete()).text
        text_chunks = events_of((await router.complete(**options)).text)[:-1]
        error = (await router.complete(suffix="x")).text
        models = (await router.http.get("/v1/models")).text

        ChatCompletion.model_validate_json(chat, strict=True)
        Completion.model_validate_json(text, strict=True)
        for chunk in chunks:
            ChatCompletionChunk.model_validate_json(chunk, strict=True)
        check_against_schemas(
            {
                "CreateChatCompletionResponse": [chat],
                "CreateChatCompletionStreamResponse": chunks,
                "CreateCompletionResponse": [text, *map(without_nulls, text_chunks)],
                "ErrorResponse": [error],
                "ListModelsResponse": [models],
            }
        )


def check_against_schemas(answers: dict[str, list[str]]) -> None:
    if not SCHEMAS.is_file():
        print("OpenAI's schemas are not at hand: not checked against them")
        return
    components = honour_nullable(json.loads(SCHEMAS.read_text())["components"])
    for name, documents in answers.items():
        schema = {"$ref": f"#/components/schemas/{name}", "components": components}
        validator = jsonschema.Draft202012Validator(schema)
        for document in documents:
            validator.validate(json.loads(document))


def honour_nullable(schema: Any) -> Any:
    """The file says 3.1 but uses `nullable`, a word of 3.0 that JSON Schema does not know."""
    if isinstance(schema, list):
        return [honour_nullable(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    converted = {key: honour_nullable(value) for key, value in schema.items() if key != "nullable"}
    return {"anyOf": [converted, {"type": "null"}]} if schema.get("nullable") else converted


def without_nulls(chunk: str) -> str:
    """OpenAI describes chunks of text completions as whole ones, whose `finish_reason` and
    `usage` are never null; but its own server sends null until the end."""
    body = json.loads(chunk)
    for choice in body["choices"]:
        choice["finish_reason"] = choice["finish_reason"] or "stop"
    return json.dumps({key: value for key, value in body.items() if value is not None})
