"""What answers tell of their prompts: `prompt_logprobs` and `echo`, also after faults."""

import asyncio
from collections.abc import Sequence
from typing import Any

import grpc
import pytest

from router.token_bytes import token_text
from router.tokenizer import TextTokenizer
from tests.router.conftest import ANSWER, StartRouter
from tests.router.fake_workers import GenerateCall, PrefillCall, fake_cluster
from tests.router.openai_schemas import check_against_schemas, without_nulls

PROMPT = "The relay 🌍 runner"


def check_entries(shown: list[Any], prompt: Sequence[int], num_top: int) -> None:
    """As the fake workers tell them."""
    assert shown[0] is None
    for token_id, entries in zip(prompt[1:], shown[1:], strict=True):
        own = entries[str(token_id)]
        assert own["logprob"] == pytest.approx(-1 / (1 + token_id))
        others = set(entries) - {str(token_id)}
        assert others == {str(index) for index in range(num_top)}
        for index in range(num_top):
            assert (entries[str(index)]["logprob"], entries[str(index)]["rank"]) == (
                -index,
                index + 1,
            )


async def test_of_completions_and_chats(
    start_router: StartRouter, answer: Sequence[int], tokenizer: TextTokenizer
) -> None:
    prompt = tokenizer.encode(PROMPT)
    async with fake_cluster(answer) as cluster, start_router(cluster) as router:
        for max_tokens in (1, 50):
            response = await router.complete(
                prompt=[[*prompt], [5]], prompt_logprobs=2, max_tokens=max_tokens
            )
            first, second = response.json()["choices"]
            check_entries(first["prompt_logprobs"], prompt, 2)
            assert second["prompt_logprobs"] == [None]
            assert "prompt_logprobs" not in response.json()
        response = await router.chat(prompt_logprobs=0)
        chat = [*cluster.prefills[0].requests[-1].prompt_token_ids]
        check_entries(response.json()["prompt_logprobs"], chat, 0)
        assert "prompt_logprobs" not in response.json()["choices"][0]
        check_against_schemas({"CreateChatCompletionResponse": [response.text]})
        assert cluster.decodes[0].requests[-1].sampling.num_prompt_logprobs == 1


async def test_not_asked_for(start_router: StartRouter, answer: Sequence[int]) -> None:
    async with fake_cluster(answer) as cluster, start_router(cluster) as router:
        for response in (await router.chat(), await router.complete()):
            assert "prompt_logprobs" not in response.text


@pytest.mark.parametrize("prompt_logprobs", [None, 3])
async def test_echo_with_logprobs(
    start_router: StartRouter,
    answer: Sequence[int],
    tokenizer: TextTokenizer,
    prompt_logprobs: int | None,
) -> None:
    prompt = tokenizer.encode(PROMPT)
    async with fake_cluster(answer) as cluster, start_router(cluster) as router:
        response = await router.complete(
            prompt=PROMPT, echo=True, logprobs=1, prompt_logprobs=prompt_logprobs
        )
        choice = response.json()["choices"][0]
        assert choice["text"] == PROMPT + ANSWER
        told = choice["logprobs"]
        tokens = [token_text(tokenizer.token_bytes(i)) for i in (*prompt, *answer)]
        assert told["tokens"] == tokens
        assert told["token_logprobs"][0] is told["top_logprobs"][0] is None
        expected = [-1 / (1 + i) for i in (*prompt[1:], *answer)]
        assert told["token_logprobs"][1:] == pytest.approx(expected)
        assert {len(top) for top in told["top_logprobs"][1:]} <= {1, 2}
        for token, offset in zip(tokens, told["text_offset"], strict=True):
            if not token.startswith("bytes:"):
                assert choice["text"][offset:].startswith(token)
        if prompt_logprobs is not None:
            check_entries(choice["prompt_logprobs"], prompt, prompt_logprobs)


async def test_echo_alone(start_router: StartRouter, answer: Sequence[int]) -> None:
    async with fake_cluster(answer) as cluster, start_router(cluster) as router:
        response = await router.complete(prompt=[PROMPT, "Hi"], echo=True)
        texts = [choice["text"] for choice in response.json()["choices"]]
        assert texts == [PROMPT + ANSWER, "Hi" + ANSWER]
        assert not cluster.decodes[0].requests[0].sampling.num_prompt_logprobs
        check_against_schemas({"CreateCompletionResponse": [without_nulls(response.text)]})
        refused = await router.complete(echo=True, stream=True, logprobs=1)
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "echo"


async def test_decode_ahead_of_prefill(
    start_router: StartRouter, answer: Sequence[int], tokenizer: TextTokenizer
) -> None:
    """Two streams: decode may have said all before the prefill worker's words have come."""

    async def late(call: PrefillCall) -> None:
        call.relay.commit(call.request.ticket.transfer_id).set_result([])
        await asyncio.sleep(0.2)
        await call.run_happily()

    async with fake_cluster(answer) as cluster, start_router(cluster) as router:
        cluster.prefills[0].scripts.append(late)
        response = await router.complete(prompt=PROMPT, prompt_logprobs=1)
        choice = response.json()["choices"][0]
        assert choice["text"] == ANSWER
        check_entries(choice["prompt_logprobs"], tokenizer.encode(PROMPT), 1)
        assert len(cluster.decodes[0].requests) == 1


async def test_prefill_fails_between_commit_and_its_words(
    start_router: StartRouter, answer: Sequence[int], tokenizer: TextTokenizer
) -> None:
    """Only something about the prompt is missing: another attempt, which says the last token
    again, and no token is told twice."""

    async def mute(call: PrefillCall) -> None:
        call.relay.commit(call.request.ticket.transfer_id).set_result([])
        await asyncio.sleep(0.2)
        await call.fail(grpc.StatusCode.ABORTED)

    async with (
        fake_cluster(answer, num_prefills=2) as cluster,
        start_router(cluster) as router,
    ):
        cluster.prefills[0].scripts.append(mute)
        response = await router.complete(prompt=PROMPT, prompt_logprobs=1, logprobs=0)
        choice = response.json()["choices"][0]
        assert choice["text"] == ANSWER
        assert len(choice["logprobs"]["tokens"]) == len(answer)
        check_entries(choice["prompt_logprobs"], tokenizer.encode(PROMPT), 1)
        _, second = cluster.decodes[0].requests
        assert [*second.samples[0].output_token_ids] == [*answer[:-1]]


async def test_what_was_told_is_not_asked_for_again(
    start_router: StartRouter, answer: Sequence[int], tokenizer: TextTokenizer
) -> None:
    async def break_off(call: GenerateCall) -> None:
        await call.relay.commit(await call.reserve())
        await asyncio.sleep(0.1)
        await call.tokens(0, answer[:2])
        await call.fail(grpc.StatusCode.UNAVAILABLE)

    async with fake_cluster(answer, num_decodes=2) as cluster, start_router(cluster) as router:
        cluster.decodes[0].scripts.append(break_off)
        response = await router.complete(prompt=PROMPT, prompt_logprobs=1)
        choice = response.json()["choices"][0]
        assert choice["text"] == ANSWER
        check_entries(choice["prompt_logprobs"], tokenizer.encode(PROMPT), 1)
        asked = [call.sampling.num_prompt_logprobs for call in cluster.prefills[0].requests]
        assert asked == [2, 0]


async def test_colocated(
    start_router: StartRouter, answer: Sequence[int], tokenizer: TextTokenizer
) -> None:
    async with (
        fake_cluster(answer, num_prefills=0) as cluster,
        start_router(cluster, mode="colocated") as router,
    ):
        response = await router.complete(prompt=PROMPT, prompt_logprobs=1)
        shown = response.json()["choices"][0]["prompt_logprobs"]
        check_entries(shown, tokenizer.encode(PROMPT), 1)
