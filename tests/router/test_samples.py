"""`n` and `best_of` on both endpoints: one call a worker, many choices, each with its own end."""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import grpc
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from router.tokenizer import TextTokenizer
from tests.router.conftest import ANSWER, StartRouter
from tests.router.dispatch_bench import Bench, Client, StartBench, make_prompt
from tests.router.fake_workers import FakeCluster, GenerateCall, fake_cluster, until
from tests.router.openai_schemas import check_against_schemas, without_nulls
from tests.router.test_app import events_of

TEXTS = [ANSWER, "Rome, they say.", "It is Oslo."]


def say_three(cluster: FakeCluster, tokenizer: TextTokenizer) -> list[tuple[int, ...]]:
    answers = [tokenizer.encode(text) for text in TEXTS]
    cluster.relay.answer, *cluster.relay.others = answers
    return answers


async def test_n_choices_of_a_chat(start_router: StartRouter, tokenizer: TextTokenizer) -> None:
    async with fake_cluster(()) as cluster, start_router(cluster) as router:
        answers = say_three(cluster, tokenizer)
        cluster.relay.prefill_hit = 2
        response = await router.chat(n=3, logprobs=True)
        body = response.json()
        assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
        assert [choice["message"]["content"] for choice in body["choices"]] == TEXTS
        for choice, tokens in zip(body["choices"], answers, strict=True):
            assert len(choice["logprobs"]["content"]) == len(tokens)
        (generate,), (prefill,) = cluster.decodes[0].requests, cluster.prefills[0].requests
        assert len(generate.samples) == len(prefill.samples) == 3
        num_prompt, num_output = len(generate.prompt_token_ids), sum(map(len, answers))
        assert body["usage"] == {
            "prompt_tokens": num_prompt,
            "prompt_tokens_details": {"cached_tokens": 2},
            "completion_tokens": num_output,
            "total_tokens": num_prompt + num_output,
        }
        ChatCompletion.model_validate_json(response.text, strict=True)
        check_against_schemas({"CreateChatCompletionResponse": [response.text]})


async def test_a_stream_of_choices(start_router: StartRouter, tokenizer: TextTokenizer) -> None:
    async with fake_cluster(()) as cluster, start_router(cluster) as router:
        say_three(cluster, tokenizer)
        options = {"n": 3, "stream": True, "stream_options": {"include_usage": True}}
        *chunks, done = events_of((await router.chat(**options)).text)
        text_chunks = events_of((await router.complete(**options)).text)[:-1]
        assert done == "[DONE]"
        texts, ends = ["", "", ""], [0, 0, 0]
        for chunk in map(json.loads, chunks[:-1]):
            (choice,) = chunk["choices"]
            assert not ends[choice["index"]], "nothing follows the end of a choice"
            texts[choice["index"]] += choice["delta"].get("content", "")
            ends[choice["index"]] += choice["finish_reason"] is not None
        assert texts == TEXTS
        assert ends == [1, 1, 1]
        for chunk in chunks:
            ChatCompletionChunk.model_validate_json(chunk, strict=True)
        check_against_schemas(
            {
                "CreateChatCompletionStreamResponse": chunks,
                "CreateCompletionResponse": [*map(without_nulls, text_chunks)],
            }
        )


async def test_choices_of_several_prompts(
    start_router: StartRouter, tokenizer: TextTokenizer
) -> None:
    """The choices of prompt i are i * n to i * n + n - 1, each behind its own echo."""
    async with fake_cluster(()) as cluster, start_router(cluster) as router:
        answers = say_three(cluster, tokenizer)
        prompts = ["One. ", "Two, three. "]
        response = await router.complete(prompt=prompts, n=2, echo=True)
        choices = response.json()["choices"]
        assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
        expected = [prompt + text for prompt in prompts for text in TEXTS[:2]]
        assert [choice["text"] for choice in choices] == expected
        usage = response.json()["usage"]
        assert usage["prompt_tokens"] == sum(len(tokenizer.encode(prompt)) for prompt in prompts)
        assert usage["completion_tokens"] == 2 * (len(answers[0]) + len(answers[1]))
        Completion.model_validate_json(response.text, strict=True)
        check_against_schemas({"CreateCompletionResponse": [response.text]})


@pytest.mark.parametrize("n", [1, 2])
async def test_the_best_are_those_with_the_highest_mean_logprob(
    start_router: StartRouter, tokenizer: TextTokenizer, n: int
) -> None:
    async with fake_cluster(()) as cluster, start_router(cluster) as router:
        answers = say_three(cluster, tokenizer)

        def mean(tokens: Sequence[int]) -> float:  # as the fake workers tell
            return sum(-1 / (1 + token_id) for token_id in tokens) / len(tokens)

        ranked = sorted(range(3), key=lambda index: -mean(answers[index]))
        response = await router.complete(n=n, best_of=3)
        choices = response.json()["choices"]
        assert [choice["text"] for choice in choices] == [TEXTS[index] for index in ranked[:n]]
        assert [choice["index"] for choice in choices] == list(range(n))
        assert all(choice["logprobs"] is None for choice in choices)
        assert response.json()["usage"]["completion_tokens"] == sum(map(len, answers))
        refused = await router.complete(n=2, best_of=1)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "best_of")
        refused = await router.complete(n=1, best_of=2, stream=True)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "best_of")


async def test_a_stop_string_ends_its_own_choice(
    start_router: StartRouter, tokenizer: TextTokenizer
) -> None:
    async with fake_cluster(()) as cluster, start_router(cluster) as router:
        say_three(cluster, tokenizer)
        response = await router.complete(n=3, stop=["they"])
        choices = response.json()["choices"]
        assert [choice["text"] for choice in choices] == [ANSWER, "Rome, ", TEXTS[2]]
        assert [choice["finish_reason"] for choice in choices] == ["stop"] * 3


@pytest.mark.parametrize("options", [{"n": 3}, {"n": 3, "stream": True}, {"best_of": 3}])
async def test_a_worker_hears_of_a_stop_string(
    options: dict[str, Any], start_router: StartRouter, tokenizer: TextTokenizer
) -> None:
    """Once, and only while other choices go on; what it still says of that one goes nowhere."""
    async with fake_cluster(()) as cluster, start_router(cluster) as router:
        answers, (worker,) = say_three(cluster, tokenizer), cluster.decodes
        in_time = asyncio.Event()

        async def say(call: GenerateCall) -> None:
            await call.relay.commit(await call.reserve())
            await call.tokens(0, answers[1], sample=1)
            await until(lambda: bool(worker.finishes))
            in_time.set()
            await call.tokens(len(answers[1]), [5, 6], sample=1)
            await call.finish(sample=1)
            await call.say_rest(0, sample=0)
            await call.say_rest(0, sample=2)

        worker.scripts.append(say)
        if options.get("stream"):
            options = {**options, "stream_options": {"include_usage": True}}
        response = await router.complete(**options, stop=["they"])
        assert in_time.is_set()
        (told,), (generate,) = worker.finishes, worker.requests
        assert (told.request_id, told.sample) == (generate.request_id, 1)
        if options.get("stream"):
            chunks = [json.loads(event) for event in events_of(response.text)[:-1]]
            usage = chunks[-1]["usage"]
            text = "".join(
                choice["text"]
                for chunk in chunks
                for choice in chunk["choices"]
                if choice["index"] == 1
            )
            assert text == "Rome, "
        else:
            usage = response.json()["usage"]
        # Tokens after the stop string are not the client's.
        of_others = len(answers[0]) + len(answers[2])
        assert of_others < usage["completion_tokens"] <= of_others + len(answers[1])


async def test_one_that_token_0_ended_is_told_of_when_it_begins(
    start_router: StartRouter, tokenizer: TextTokenizer
) -> None:
    async with fake_cluster(()) as cluster, start_router(cluster) as router:
        answers, (worker,) = say_three(cluster, tokenizer), cluster.decodes

        async def say(call: GenerateCall) -> None:
            await call.relay.commit(await call.reserve())
            assert not worker.finishes, "it has not begun there"
            for sample in range(3):
                await call.tokens(0, answers[sample][:1], sample=sample)
            await until(lambda: bool(worker.finishes))
            await call.finish(sample=1)
            await call.say_rest(1, sample=0)
            await call.say_rest(1, sample=2)

        worker.scripts.append(say)
        response = await router.complete(n=3, stop=[TEXTS[1][0]])
        assert [told.sample for told in worker.finishes] == [1]
        assert response.json()["choices"][1]["text"] == ""


async def test_nothing_is_told_where_all_end(
    start_router: StartRouter, tokenizer: TextTokenizer
) -> None:
    answer = tokenizer.encode(TEXTS[1])
    async with fake_cluster(answer) as cluster, start_router(cluster) as router:
        response = await router.complete(stop=["they"])
        assert response.json()["choices"][0]["text"] == "Rome, "
        assert not cluster.decodes[0].finishes


async def test_all_end_with_the_client(start_router: StartRouter, answer: Sequence[int]) -> None:
    async with fake_cluster(answer) as cluster, start_router(cluster) as router:

        async def endless(call: GenerateCall) -> None:
            await call.relay.commit(await call.reserve())
            for sample in range(3):
                await call.tokens(0, answer[:2], sample=sample)
            await call.hang()

        cluster.decodes[0].scripts.append(endless)
        body = {"model": "tiny", "prompt": "Hi", "n": 3, "stream": True}
        async with router.http.stream("POST", "/v1/completions", json=body) as response:
            async for _ in response.aiter_lines():
                break
        await until(lambda: cluster.relay.num_open_calls == 0)


async def run_three(bench: Bench, max_tokens: int = 50) -> list[list[int]]:
    clients = [Client() for _ in range(3)]
    prompt = replace(make_prompt(max_tokens), num_samples=3)
    await bench.dispatcher.run(prompt, [client.take for client in clients])
    return [client.token_ids for client in clients]


async def test_a_broken_stream_goes_on_where_each_sample_was(start_bench: StartBench) -> None:
    async with start_bench(num_decodes=2) as bench:
        bench.cluster.relay.others = [(11, 21, 22), (31,)]

        async def break_off(call: GenerateCall) -> None:
            await call.relay.commit(await call.reserve())
            await call.tokens(0, [11, 12])
            await call.tokens(0, [11], sample=1)
            await call.tokens(0, [31], sample=2)
            await call.finish(sample=2)
            await call.fail(grpc.StatusCode.UNAVAILABLE)

        bench.cluster.decodes[0].scripts.append(break_off)
        assert await run_three(bench) == [[11, 12, 13, 14], [11, 21, 22], [31]]
        (again,) = bench.cluster.decodes[1].requests
        assert [list(sample.output_token_ids) for sample in again.samples] == [[11, 12], [11], []]
        assert [sample.is_finished for sample in again.samples] == [False, False, True]
        # Both legs must agree on who samples token 0.
        assert list(bench.cluster.prefills[0].requests[-1].samples) == list(again.samples)


async def test_each_sample_is_load(start_bench: StartBench) -> None:
    async with start_bench() as bench:
        loads = []

        async def look(call: GenerateCall) -> None:
            loads.append(bench.workers.decodes[0].load)
            await call.run_happily()

        bench.cluster.decodes[0].scripts.append(look)
        await run_three(bench)
        assert loads == [3]


async def test_one_token_of_each_needs_no_handoff(start_bench: StartBench) -> None:
    async with start_bench() as bench:
        bench.cluster.relay.others = [(21, 22), (31,)]
        assert await run_three(bench, max_tokens=1) == [[11], [21], [31]]
        assert not bench.cluster.decodes[0].requests


async def test_a_sample_that_nobody_asked_for_is_a_contradiction(start_bench: StartBench) -> None:
    async with start_bench(num_decodes=2) as bench:

        async def confused(call: GenerateCall) -> None:
            await call.relay.commit(await call.reserve())
            await call.tokens(0, [1], sample=1)
            await call.hang()

        bench.cluster.decodes[0].scripts.append(confused)
        assert (await bench.run()).token_ids == list(bench.cluster.relay.answer)
        assert bench.retries("decode", "contradiction") == 1
