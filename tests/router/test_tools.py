"""Tools through the whole endpoint: what models are told, what clients get, streamed or not."""

import json
from typing import Any

import httpx
import openai
import pytest

from router.tokenizer import TextTokenizer
from tests.router.chat_answers import answers, joined, with_room, without_ids
from tests.router.conftest import RunningRouter, StartRouter
from tests.router.fake_workers import FakeCluster, fake_cluster

TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
ARGUMENTS = '{"city": "東京 🌍", "n": [1, "}"]}'
CALL = f'<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
SAID = f"Let me see.\n{CALL}\n{CALL}\nBye 🏃‍♀️"


async def tool_answers(
    cluster: FakeCluster, router: RunningRouter, tokenizer: TextTokenizer, text: str, **body: Any
) -> tuple[Any, list[Any]]:
    return await answers(cluster, router, tokenizer, text, **{"tools": [TOOL], **body})


@pytest.mark.parametrize(
    ("text", "calls", "content", "reason"),
    [
        (SAID, 2, "Let me see.\n\nBye 🏃‍♀️", "tool_calls"),
        (CALL, 1, None, "tool_calls"),
        ("No tools, <thanks>.", 0, "No tools, <thanks>.", "stop"),
        ("<tool_call> is a tag.", 0, "<tool_call> is a tag.", "stop"),
    ],
)
async def test_calls_whole_and_streamed(
    start_router: StartRouter,
    tokenizer: TextTokenizer,
    text: str,
    calls: int,
    content: str | None,
    reason: str,
) -> None:
    async with fake_cluster(()) as cluster, start_router(cluster) as router:
        choice, chunks = await tool_answers(cluster, router, tokenizer, text)
        message = choice["message"]
        assert choice["finish_reason"] == reason
        assert message["content"] == content
        told = [call["function"] for call in message.get("tool_calls", [])]
        assert told == calls * [{"name": "get_weather", "arguments": ARGUMENTS}]
        assert joined(chunks) == (without_ids(message), reason)
        ids = {call["id"] for call in message.get("tool_calls", [])}
        assert len(ids) == calls


async def test_a_call_that_max_tokens_cut(
    start_router: StartRouter, tokenizer: TextTokenizer
) -> None:
    async with fake_cluster(()) as cluster, start_router(cluster) as router:
        num_tokens = len(tokenizer.encode(CALL.partition("東")[0]))
        choice, chunks = await tool_answers(cluster, router, tokenizer, CALL, max_tokens=num_tokens)
        (call,) = choice["message"]["tool_calls"]
        assert choice["finish_reason"] == "length"
        assert call["function"]["arguments"] == '{"city": "'
        assert joined(chunks) == (without_ids(choice["message"]), "length")


@pytest.mark.parametrize(
    ("stop", "arguments", "reason"),
    [
        (" 🌍", '{"city": "東京', "stop"),
        ("]}", '{"city": "東京 🌍", "n": [1, "}"', "stop"),
        ("}\n</tool_call>", ARGUMENTS, "tool_calls"),
    ],
)
async def test_a_call_that_a_stop_string_cut(
    start_router: StartRouter, tokenizer: TextTokenizer, stop: str, arguments: str, reason: str
) -> None:
    async with fake_cluster(()) as cluster, start_router(cluster) as router:
        choice, chunks = await tool_answers(cluster, router, tokenizer, CALL, stop=stop)
        (call,) = choice["message"]["tool_calls"]
        assert call["function"]["arguments"] == arguments
        assert choice["finish_reason"] == reason
        assert joined(chunks) == (without_ids(choice["message"]), reason)


async def test_logprobs_of_all_tokens_go_out(
    start_router: StartRouter, tokenizer: TextTokenizer
) -> None:
    async with fake_cluster(()) as cluster, start_router(cluster) as router:
        choice, chunks = await tool_answers(cluster, router, tokenizer, SAID, logprobs=True)
        told = choice["logprobs"]["content"]
        assert len(told) == len(tokenizer.encode(SAID))
        streamed = [
            entry for chunk in chunks for entry in (chunk["logprobs"] or {"content": []})["content"]
        ]
        assert streamed == told


async def test_a_forced_call_is_held_by_a_grammar(
    start_router: StartRouter, tokenizer: TextTokenizer
) -> None:
    named = {"type": "function", "function": {"name": "get_weather"}}
    async with fake_cluster(()) as cluster, start_router(cluster) as router:
        for choice in ("auto", "required", named):
            await tool_answers(cluster, router, tokenizer, CALL, tool_choice=choice)
        asked = [request.sampling.grammar for request in cluster.decodes[0].requests]
        assert not any(asked[:2])
        assert all("get_weather" in grammar for grammar in asked[2:])
        assert asked[2] != asked[4]


async def test_a_model_that_knows_no_tools_is_told_of_them(
    start_router: StartRouter, tokenizer: TextTokenizer
) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": None, "tool_calls": [call, call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "hot"}]},
    ]
    async with fake_cluster(()) as cluster, start_router(cluster) as router:
        await tool_answers(cluster, router, tokenizer, "Hi", messages=messages)
        ids = cluster.decodes[0].requests[0].prompt_token_ids
        prompt = tokenizer._tokenizer.decode(ids, skip_special_tokens=False)
        turns = [turn.removesuffix("<|im_end|>\n") for turn in prompt.split("<|im_start|>")[1:]]
        assert turns[0].startswith("system\nBe brief.\n\n# Tools")
        assert json.dumps(TOOL) in turns[0]
        written = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
        assert turns[2] == f"assistant\n{written}\n{written}"
        result = "<tool_response>\n{}\n</tool_response>"
        assert turns[3] == f"user\n{result.format('sunny')}\n{result.format('hot')}"
        await tool_answers(cluster, router, tokenizer, "Hi", tool_choice="none")
        assert cluster.decodes[0].requests[-1].prompt_token_ids[:5] != ids[:5]


def error_of(response: httpx.Response) -> tuple[int, str | None]:
    return response.status_code, response.json()["error"]["param"]


CUSTOM = {"type": "custom", "custom": {"name": "f"}}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tools": [CUSTOM]}, "tools.0.type"),
        ({"tools": [TOOL, TOOL]}, "tools"),
        ({"tools": [TOOL] * 129}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": "sometimes"}, "tool_choice"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}},
            "tool_choice",
        ),
        ({"tools": [TOOL], "tool_choice": "required", "guided_regex": "a"}, "guided_regex"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.tool_call_id"),
        ({"messages": [{"role": "user", "content": None}]}, "messages.0.content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages.0.content.0.type",
        ),
    ],
)
async def test_refusals(start_router: StartRouter, body: dict[str, object], param: str) -> None:
    async with fake_cluster(()) as cluster, start_router(cluster) as router:
        assert error_of(await router.chat(**body)) == (400, param)


async def test_a_strict_schema_that_no_grammar_holds(start_router: StartRouter) -> None:
    bad = {"type": "object", "properties": {"a": {"type": "string", "pattern": "(?=a)"}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": bad, "strict": True}}
    async with fake_cluster(()) as cluster, start_router(cluster) as router:
        await with_room(cluster, router)
        response = await router.chat(tools=[tool])
        assert error_of(response) == (400, "tools")
        assert "look-around" in response.json()["error"]["message"]


async def test_a_router_that_is_told_of_no_parser(start_router: StartRouter) -> None:
    async with (
        fake_cluster(()) as cluster,
        start_router(cluster, tool_call_parser="none") as router,
    ):
        assert error_of(await router.chat(tools=[TOOL])) == (400, "tools")


async def test_openais_client_puts_the_stream_together(
    start_router: StartRouter, tokenizer: TextTokenizer
) -> None:
    async with fake_cluster(tokenizer.encode(SAID)) as cluster, start_router(cluster) as router:
        await with_room(cluster, router)
        async with (
            openai.AsyncOpenAI(base_url=f"{router.url}/v1", api_key="none") as client,
            client.chat.completions.stream(
                model="tiny",
                messages=[{"role": "user", "content": "Weather?"}],
                tools=[TOOL],  # type: ignore[list-item]
            ) as stream,
        ):
            completion = await stream.get_final_completion()
        (choice,) = completion.choices
        assert choice.finish_reason == "tool_calls"
        told = [call.function.arguments for call in choice.message.tool_calls or ()]
        assert told == [ARGUMENTS] * 2
