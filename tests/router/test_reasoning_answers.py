"""What a model thinks, in fields of its own, streamed or not."""

import pytest

from router.tokenizer import TextTokenizer
from tests.router.chat_answers import answers, joined, without_ids
from tests.router.conftest import StartRouter
from tests.router.fake_workers import fake_cluster

INTEGER = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("parser", "text", "thought", "content"),
    [
        ("qwen3", "<think>\nHm 🌍.\n</think>\n\nParis.", "Hm 🌍.", "Paris."),
        ("qwen3", "Paris.", None, "Paris."),
        ("deepseek_r1", "Hm 🌍.</think>Paris.", "Hm 🌍.", "Paris."),
        ("deepseek_r1", "cut", "cut", None),
        ("none", "<think>Hm</think>Paris.", None, "<think>Hm</think>Paris."),
    ],
)
async def test_thought_and_said(
    start_router: StartRouter,
    tokenizer: TextTokenizer,
    parser: str,
    text: str,
    thought: str | None,
    content: str | None,
) -> None:
    async with (
        fake_cluster(()) as cluster,
        start_router(cluster, reasoning_parser=parser) as router,
    ):
        choice, chunks = await answers(cluster, router, tokenizer, text)
        message = choice["message"]
        assert message["content"] == content
        assert message.get("reasoning_content") == message.get("reasoning") == thought
        assert joined(chunks) == (without_ids(message), "stop")


async def test_a_form_holds_for_what_it_says(
    start_router: StartRouter, tokenizer: TextTokenizer
) -> None:
    async with (
        fake_cluster(()) as cluster,
        start_router(cluster, reasoning_parser="qwen3") as router,
    ):
        text = "<think>What?</think>42"
        choice, _ = await answers(cluster, router, tokenizer, text, response_format=INTEGER)
        assert choice["message"]["content"] == "42"
        grammar = cluster.decodes[0].requests[0].sampling.grammar
        assert tokenizer.vocabulary is not None
        tokenizer.vocabulary.compile(grammar).advance(tokenizer.encode(text))
