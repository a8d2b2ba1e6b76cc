"""Chats asked twice, whole and streamed, and what a client makes of both."""

import json
from collections.abc import Sequence
from typing import Any

from openai.types.chat import ChatCompletion, ChatCompletionChunk

from router.tokenizer import TextTokenizer
from tests.router.conftest import RunningRouter
from tests.router.fake_workers import FakeCluster, until
from tests.router.openai_schemas import check_against_schemas
from tests.router.test_app import events_of


async def with_room(cluster: FakeCluster, router: RunningRouter) -> None:
    for worker in cluster.workers:
        worker.status.max_model_len = 4000
    await until(lambda: router.router.workers.max_model_len == 4000)


async def answers(
    cluster: FakeCluster, router: RunningRouter, tokenizer: TextTokenizer, text: str, **body: Any
) -> tuple[Any, list[Any]]:
    """(the message and reason of the whole answer, the chunks of the streamed one)"""
    await with_room(cluster, router)
    cluster.relay.answer = tokenizer.encode(text)
    whole = (await router.chat(**body)).raise_for_status()
    streamed = (await router.chat(stream=True, **body)).raise_for_status()
    chunks = events_of(streamed.text)[:-1]
    ChatCompletion.model_validate_json(whole.text, strict=True)
    for chunk in chunks:
        ChatCompletionChunk.model_validate_json(chunk, strict=True)
    check_against_schemas(
        {
            "CreateChatCompletionResponse": [whole.text],
            "CreateChatCompletionStreamResponse": chunks,
        }
    )
    return whole.json()["choices"][0], [json.loads(chunk)["choices"][0] for chunk in chunks]


def joined(chunks: Sequence[Any]) -> tuple[dict[str, Any], str]:
    """The message that a client makes of chunks, ids aside, and the one finish reason."""
    message: dict[str, Any] = {}
    reasons = [chunk["finish_reason"] for chunk in chunks if chunk["finish_reason"]]
    assert len(reasons) == 1
    assert chunks[-1]["finish_reason"]
    for chunk in chunks:
        delta = dict(chunk["delta"])
        for call in delta.pop("tool_calls", ()):
            calls = message.setdefault("tool_calls", [])
            if call["index"] == len(calls):
                assert call["id"].startswith("call_")
                assert call["type"] == "function"
                calls.append(dict(call["function"]))
            else:
                assert call.keys() == {"index", "function"}
                assert call["function"].keys() == {"arguments"}
                calls[call["index"]]["arguments"] += call["function"]["arguments"]
        for key, value in delta.items():
            message[key] = message.get(key, "") + value
    return message, reasons[0]


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    told = {key: value for key, value in message.items() if key != "refusal"}
    told["content"] = told["content"] or ""
    if "tool_calls" in told:
        told["tool_calls"] = [call["function"] for call in told["tool_calls"]]
    return told
