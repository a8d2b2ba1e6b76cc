"""OpenAI's own Python client as the yardstick."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import openai
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from tests.router.conftest import ANSWER, RunningRouter, StartRouter
from tests.router.fake_workers import fake_cluster
from tests.router.test_app import events_of


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
        ChatCompletion.model_validate_json(chat, strict=True)
        Completion.model_validate_json(text, strict=True)
        for chunk in chunks:
            ChatCompletionChunk.model_validate_json(chunk, strict=True)
