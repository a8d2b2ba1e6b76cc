"""Parameters of both endpoints: each works, or is refused by name."""

import json
from collections.abc import Sequence
from typing import Any

import pytest

from router.tokenizer import TextTokenizer
from tests.router.conftest import ANSWER, StartRouter
from tests.router.fake_workers import fake_cluster
from tests.router.test_app import events_of


def chunks_of(text: str) -> list[Any]:
    return [json.loads(event) for event in events_of(text)[:-1]]


async def test_token_ids_in_and_out(
    start_router: StartRouter, tokenizer: TextTokenizer, answer: Sequence[int]
) -> None:
    """For routers above us: no text is needed on the way in, and ids come out."""
    prompt = list(tokenizer.encode("Hi"))
    asked = {"prompt": prompt, "return_token_ids": True}
    async with fake_cluster(answer) as cluster, start_router(cluster) as router:
        (whole,) = (await router.complete(**asked)).json()["choices"]
        assert whole["token_ids"] == list(answer)
        assert whole["prompt_token_ids"] == prompt
        assert whole["logprobs"] is None
        chunks = chunks_of((await router.complete(**asked, stream=True)).text)
        told = [chunk["choices"][0] for chunk in chunks]
        assert [choice.get("prompt_token_ids") for choice in told] == [prompt] + [None] * (
            len(told) - 1
        )
        assert [id for choice in told for id in choice["token_ids"]] == list(answer)
        assert "".join(choice["text"] for choice in told) == ANSWER

        chat = (await router.chat(return_token_ids=True)).json()
        assert chat["prompt_token_ids"] == list(cluster.decodes[0].requests[-1].prompt_token_ids)
        assert chat["choices"][0]["token_ids"] == list(answer)
        chunks = chunks_of(
            (await router.chat(return_token_ids=True, stream=True, logprobs=True)).text
        )
        assert [("prompt_token_ids" in chunk) for chunk in chunks] == [True] + [False] * (
            len(chunks) - 1
        )
        ids = [id for chunk in chunks for id in chunk["choices"][0].get("token_ids", ())]
        assert ids == list(answer)


async def test_token_ids_tell_no_more_than_the_text(
    start_router: StartRouter, tokenizer: TextTokenizer, answer: Sequence[int]
) -> None:
    async with fake_cluster(answer) as cluster, start_router(cluster) as router:
        for body in ({}, {"stream": True}):
            reply = await router.complete(stop=["🌍 is"], return_token_ids=True, **body)
            told = chunks_of(reply.text) if body else [reply.json()]
            ids = [id for chunk in told for id in chunk["choices"][0]["token_ids"]]
            assert tokenizer._tokenizer.decode(ids) == "Paris "


async def test_usage_in_every_chunk(start_router: StartRouter, answer: Sequence[int]) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    async with fake_cluster(answer) as cluster, start_router(cluster) as router:
        for post in (router.chat, router.complete):
            chunks = chunks_of((await post(stream=True, stream_options=options)).text)
            told = [chunk["usage"]["completion_tokens"] for chunk in chunks]
            assert told == sorted(told)
            assert told[0] < told[-1] == len(answer)
            assert not chunks[-1]["choices"]


@pytest.mark.parametrize("include", [None, False])
async def test_usage_is_not_sent_when_not_asked_for(
    start_router: StartRouter, answer: Sequence[int], include: bool | None
) -> None:
    options = None if include is None else {"include_usage": include}
    async with fake_cluster(answer) as cluster, start_router(cluster) as router:
        for post in (router.chat, router.complete):
            chunks = chunks_of((await post(stream=True, stream_options=options)).text)
            assert all("usage" not in chunk and chunk["choices"] for chunk in chunks)


async def test_a_stop_string_may_stay(start_router: StartRouter, answer: Sequence[int]) -> None:
    asked = {"stop": ["🌍 is", "nowhere"], "include_stop_str_in_output": True}
    async with fake_cluster(answer) as cluster, start_router(cluster) as router:
        (whole,) = (await router.complete(**asked)).json()["choices"]
        assert (whole["text"], whole["finish_reason"]) == ("Paris 🌍 is", "stop")
        chunks = chunks_of((await router.complete(**asked, stream=True)).text)
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole["text"]


async def test_special_tokens_are_shown_if_wanted(
    start_router: StartRouter, tokenizer: TextTokenizer
) -> None:
    answer = tokenizer.encode("a<|im_start|>b c")
    async with fake_cluster(answer) as cluster, start_router(cluster) as router:
        for skips, text in ((True, "ab c"), (False, "a<|im_start|>b c")):
            reply = (await router.complete(skip_special_tokens=skips)).json()
            assert reply["choices"][0]["text"] == text


async def test_tokens_by_id(start_router: StartRouter, answer: Sequence[int]) -> None:
    async with fake_cluster(answer) as cluster, start_router(cluster) as router:
        names = [f"token_id:{token_id}" for token_id in answer]
        asked = {"return_tokens_as_token_ids": True}
        (choice,) = (await router.complete(logprobs=1, **asked)).json()["choices"]
        assert choice["logprobs"]["tokens"] == names
        (choice,) = (await router.chat(logprobs=True, **asked)).json()["choices"]
        assert [entry["token"] for entry in choice["logprobs"]["content"]] == names


async def test_echo(start_router: StartRouter, answer: Sequence[int]) -> None:
    prompts = ["Größe", "Hi"]
    async with fake_cluster(answer) as cluster, start_router(cluster) as router:
        chunks = chunks_of(
            (await router.complete(prompt=prompts, echo=True, stream=True, n=2)).text
        )
        texts = ["", "", "", ""]
        for chunk in chunks:
            (choice,) = chunk["choices"]
            texts[choice["index"]] += choice["text"]
        assert texts == [f"{prompt}{ANSWER}" for prompt in prompts for _ in range(2)]
        response = await router.complete(echo=True, logprobs=1, stream=True)
        assert (response.status_code, response.json()["error"]["param"]) == (400, "echo")


async def test_a_prompt_alone(
    start_router: StartRouter, tokenizer: TextTokenizer, answer: Sequence[int]
) -> None:
    """As evaluation harnesses ask how likely a text is."""
    async with fake_cluster(answer) as cluster, start_router(cluster) as router:
        asked = {"prompt": "Größe", "max_tokens": 0, "echo": True, "logprobs": 1}
        reply = (await router.complete(**asked)).json()
        (choice,) = reply["choices"]
        assert (choice["text"], choice["finish_reason"]) == ("Größe", "length")
        assert len(choice["logprobs"]["tokens"]) == len(tokenizer.encode("Größe"))
        assert reply["usage"]["completion_tokens"] == 0
        for change in ({"echo": False}, {"stream": True, "logprobs": None}):
            response = await router.complete(**{**asked, **change})
            assert (response.status_code, response.json()["error"]["param"]) == (400, "max_tokens")


async def test_prompts_are_cut_from_the_left(
    start_router: StartRouter, tokenizer: TextTokenizer, answer: Sequence[int]
) -> None:
    prompt = "The capital of France"
    async with fake_cluster(answer) as cluster, start_router(cluster) as router:
        for text in (prompt, list(tokenizer.encode(prompt))):
            await router.complete(prompt=text, truncate_prompt_tokens=2)
            told = cluster.decodes[0].requests[-1].prompt_token_ids
            assert tuple(told) == tokenizer.encode(prompt)[-2:]


REFUSED_BY_BOTH: list[tuple[str, object]] = [
    ("use_beam_search", True),
    ("length_penalty", 0.5),
    ("logits_processors", ["x"]),
    ("kv_transfer_params", {"a": 1}),
    ("vllm_xargs", {"a": 1}),
    ("prompt_embeds", "AAAA"),
    ("spaces_between_special_tokens", False),
    ("request_id", "mine"),
    ("truncate_prompt_tokens", -1),
    ("store", True),
    ("service_tier", "flex"),
    ("moderation", {"model": "omni"}),
    ("prompt_cache_retention", "24h"),
    ("prompt_cache_options", {}),
]
REFUSED_BY_CHATS: list[tuple[str, object]] = [
    ("audio", {"voice": "alloy", "format": "wav"}),
    ("modalities", ["text", "audio"]),
    ("prediction", {"type": "content", "content": "x"}),
    ("web_search_options", {}),
    ("verbosity", "high"),
    ("reasoning_effort", "high"),
    ("functions", [{"name": "f"}]),
    ("function_call", "auto"),
    ("chat_template", "{{ 1 }}"),
    ("documents", [{"text": "x"}]),
    ("mm_processor_kwargs", {"a": 1}),
    ("echo", True),
    ("best_of", 2),
    ("suffix", "x"),
]
HARMLESS: dict[str, object] = {
    "use_beam_search": False,
    "length_penalty": 1.0,
    "spaces_between_special_tokens": True,
    "store": False,
    "service_tier": "auto",
    "user": "u",
    "metadata": {"a": "b"},
    "safety_identifier": "s",
    "prompt_cache_key": "k",
    "prompt_cache_retention": "in_memory",
    "logit_bias": None,
    "stop": None,
    "seed": None,
}
HARMLESS_IN_CHATS: dict[str, object] = {
    "modalities": ["text"],
    "verbosity": "medium",
    "reasoning_effort": "none",
    "functions": [],
    "tools": [],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "documents": [],
    "prediction": None,
    "audio": None,
    "web_search_options": None,
    "include_reasoning": True,
    "chat_template_kwargs": {"enable_thinking": False},
    "add_generation_prompt": True,
}


async def test_each_is_refused_by_name(start_router: StartRouter) -> None:
    async with fake_cluster(()) as cluster, start_router(cluster) as router:
        for name, value in [*REFUSED_BY_BOTH, *REFUSED_BY_CHATS]:
            response = await router.chat(**{name: value})
            error = response.json()["error"]
            assert (response.status_code, error["param"]) == (400, name)
            assert repr(name) in error["message"]
        for name, value in [*REFUSED_BY_BOTH, ("suffix", "x"), ("messages", []), ("tools", [{}])]:
            response = await router.complete(**{name: value})
            assert (response.status_code, response.json()["error"]["param"]) == (400, name)


async def test_what_asks_for_nothing_is_taken(
    start_router: StartRouter, answer: Sequence[int]
) -> None:
    async with fake_cluster(answer) as cluster, start_router(cluster) as router:
        assert (await router.chat(**HARMLESS, **HARMLESS_IN_CHATS)).status_code == 200
        assert (await router.complete(**HARMLESS, suffix="", best_of=1)).status_code == 200
