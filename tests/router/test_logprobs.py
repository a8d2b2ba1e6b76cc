"""Logprobs over HTTP: the shapes of both endpoints, whole and streamed, and after faults."""

import json
from collections.abc import Sequence
from typing import Any

import grpc
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from router.token_bytes import token_text
from router.tokenizer import TextTokenizer
from tests.router.conftest import ANSWER, StartRouter
from tests.router.fake_workers import FakeCluster, GenerateCall, fake_cluster
from tests.router.openai_schemas import check_against_schemas, without_nulls
from tests.router.test_app import events_of

CHAT = {"logprobs": True, "top_logprobs": 2}


def chunk_choices(text: str) -> list[dict[str, Any]]:
    return [json.loads(event)["choices"][0] for event in events_of(text)[:-1]]


def check_chat_content(
    content: list[dict[str, Any]], answer: Sequence[int], tokenizer: TextTokenizer
) -> None:
    assert [entry["logprob"] for entry in content] == pytest.approx([-1 / (1 + i) for i in answer])
    assert [bytes(entry["bytes"]) for entry in content] == list(map(tokenizer.token_bytes, answer))
    assert b"".join(bytes(entry["bytes"]) for entry in content).decode() == ANSWER
    for entry in content:
        assert entry["token"] == token_text(bytes(entry["bytes"]))
        assert [top["logprob"] for top in entry["top_logprobs"]] == [0, -1]
        assert [bytes(top["bytes"]) for top in entry["top_logprobs"]] == [
            tokenizer.token_bytes(0),
            tokenizer.token_bytes(1),
        ]


async def test_of_chats(
    start_router: StartRouter, answer: Sequence[int], tokenizer: TextTokenizer
) -> None:
    async with fake_cluster(answer) as cluster, start_router(cluster) as router:
        whole = (await router.chat(**CHAT)).text
        stream = (await router.chat(**CHAT, stream=True)).text
        choice = json.loads(whole)["choices"][0]
        assert choice["logprobs"]["refusal"] is None
        check_chat_content(choice["logprobs"]["content"], answer, tokenizer)
        content = []
        for chunk in chunk_choices(stream):
            if chunk["logprobs"] is not None:
                content += chunk["logprobs"]["content"]
        check_chat_content(content, answer, tokenizer)
        assert [call.sampling.num_logprobs for call in cluster.decodes[0].requests] == [3, 3]
        ChatCompletion.model_validate_json(whole, strict=True)
        chunks = events_of(stream)[:-1]
        for event in chunks:
            ChatCompletionChunk.model_validate_json(event, strict=True)
        check_against_schemas(
            {"CreateChatCompletionResponse": [whole], "CreateChatCompletionStreamResponse": chunks}
        )


async def test_of_text_completions(
    start_router: StartRouter, answer: Sequence[int], tokenizer: TextTokenizer
) -> None:
    texts = [token_text(tokenizer.token_bytes(token_id)) for token_id in answer]
    async with fake_cluster(answer) as cluster, start_router(cluster) as router:
        whole = (await router.complete(logprobs=2)).text
        stream = (await router.complete(logprobs=2, stream=True)).text
        Completion.model_validate_json(whole, strict=True)
        chunks = [without_nulls(event) for event in events_of(stream)[:-1]]
        check_against_schemas({"CreateCompletionResponse": [whole, *chunks]})
        told = json.loads(whole)["choices"][0]["logprobs"]
        joined: dict[str, list[Any]] = {name: [] for name in told}
        for chunk in chunk_choices(stream):
            for name, values in (chunk["logprobs"] or {}).items():
                joined[name] += values
        assert joined == told
        assert told["tokens"] == texts
        assert told["token_logprobs"] == pytest.approx([-1 / (1 + i) for i in answer])
        first, second = (token_text(tokenizer.token_bytes(i)) for i in (0, 1))
        for text, top in zip(texts, told["top_logprobs"], strict=True):
            assert (top[first], top[second]) == (0, -1)
            assert text in top
        for text, offset in zip(texts, told["text_offset"], strict=True):
            if not text.startswith("bytes:"):
                assert ANSWER[offset:].startswith(text)


async def test_of_the_token_alone(start_router: StartRouter, answer: Sequence[int]) -> None:
    async with fake_cluster(answer) as cluster, start_router(cluster) as router:
        chat = (await router.chat(logprobs=True)).json()["choices"][0]["logprobs"]["content"]
        assert {tuple(entry["top_logprobs"]) for entry in chat} == {()}
        text = (await router.complete(logprobs=0)).json()["choices"][0]["logprobs"]
        assert [list(top) for top in text["top_logprobs"]] == [[token] for token in text["tokens"]]


async def test_not_asked_for(start_router: StartRouter, answer: Sequence[int]) -> None:
    async with fake_cluster(answer) as cluster, start_router(cluster) as router:
        for response in (await router.chat(), await router.complete()):
            assert response.json()["choices"][0]["logprobs"] is None
        for chunk in chunk_choices((await router.chat(stream=True)).text):
            assert chunk["logprobs"] is None


async def test_one_token_that_prefill_alone_answers(
    start_router: StartRouter, answer: Sequence[int]
) -> None:
    async with fake_cluster(answer) as cluster, start_router(cluster) as router:
        response = await router.chat(**CHAT, max_tokens=1)
        (entry,) = response.json()["choices"][0]["logprobs"]["content"]
        assert entry["logprob"] == pytest.approx(-1 / (1 + answer[0]))
        assert not cluster.decodes[0].requests


async def test_a_stop_string_ends_them_too(
    start_router: StartRouter, answer: Sequence[int]
) -> None:
    async with fake_cluster(answer) as cluster, start_router(cluster) as router:
        for stream in (False, True):
            response = await router.complete(stop=[" is"], logprobs=0, stream=stream)
            choices = chunk_choices(response.text) if stream else response.json()["choices"]
            offsets = [
                i for c in choices for i in (c["logprobs"] or {"text_offset": []})["text_offset"]
            ]
            assert "".join(choice["text"] for choice in choices) == "Paris 🌍"
            assert offsets
            assert max(offsets) < len("Paris 🌍")


async def test_after_a_decode_worker_died(
    start_router: StartRouter, answer: Sequence[int], tokenizer: TextTokenizer
) -> None:
    async def break_off(call: GenerateCall) -> None:
        await call.relay.commit(await call.reserve())
        await call.tokens(0, answer[:3])
        await call.fail(grpc.StatusCode.UNAVAILABLE)

    async with fake_cluster(answer, num_decodes=2) as cluster, start_router(cluster) as router:
        for decode in cluster.decodes:
            decode.scripts.append(break_off)
            break
        response = await router.chat(**CHAT)
        content = response.json()["choices"][0]["logprobs"]["content"]
        check_chat_content(content, answer, tokenizer)
        assert num_calls(cluster) == 2


def num_calls(cluster: FakeCluster) -> int:
    return sum(len(decode.requests) for decode in cluster.decodes)


async def test_a_worker_that_does_not_tell_them_is_left(
    start_router: StartRouter, answer: Sequence[int], tokenizer: TextTokenizer
) -> None:
    async def mute(call: GenerateCall) -> None:
        await call.relay.commit(await call.reserve())
        call.request.sampling.num_logprobs = 0
        await call.say_rest(0)

    async with fake_cluster(answer) as cluster, start_router(cluster) as router:
        cluster.decodes[0].scripts.append(mute)
        response = await router.chat(**CHAT)
        check_chat_content(response.json()["choices"][0]["logprobs"]["content"], answer, tokenizer)
        assert router.metric("baton_retries_total", leg="decode", reason="logprobs_missing") == 1


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ],
)
async def test_refusals(start_router: StartRouter, change: dict[str, object], param: str) -> None:
    async with fake_cluster(()) as cluster, start_router(cluster) as router:
        response = await router.chat(**change)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == param
