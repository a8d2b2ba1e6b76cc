"""What public trackers report of serving systems, as tests: one each. Beside these stand
test_tools.py (a call cut by max_tokens) and test_parameters.py (usage when not asked for)."""

import asyncio
import json
import random
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any

import pytest

from protos import serving_pb2 as pb
from router.tokenizer import TextTokenizer
from tests.router.conftest import ANSWER, RunningRouter, StartRouter
from tests.router.fake_workers import GenerateCall, fake_cluster, until
from tests.router.test_app import events_of
from tests.router.test_disconnect import raw_post, some_tokens_and_hang

SPOKEN = (
    "🌍",
    "🏃‍♀️",
    "👩‍👩‍👧‍👦",
    "한국어",
    "e\u0301",
    "\u1112\u1161\u11ab",
    "東京",
    " ",
    "stop",
    "st",
    "\n",
    "a",
    "🇫🇷",
)


def text_of(choice: Any) -> str:
    if "text" in choice:
        return str(choice["text"])
    return (choice.get("message") or choice["delta"]).get("content") or ""


async def both(router: RunningRouter, kind: str, **body: Any) -> tuple[list[str], list[Any]]:
    """(the texts, the choices of all chunks) of one request that is asked twice: both ways say the
    same, and each choice ends once, with its last chunk."""
    post = router.chat if kind == "chat" else router.complete
    whole = (await post(**body)).raise_for_status().json()["choices"]
    streamed = events_of((await post(stream=True, **body)).raise_for_status().text)[:-1]
    chunks = [choice for event in streamed for choice in json.loads(event)["choices"]]
    for choice in whole:
        parts = [part for part in chunks if part["index"] == choice["index"]]
        assert "".join(map(text_of, parts)) == text_of(choice)
        reasons = [part["finish_reason"] for part in parts]
        assert reasons == [None] * (len(parts) - 1) + [choice["finish_reason"]]
    return [text_of(choice) for choice in whole], chunks


@pytest.mark.parametrize("num_samples", [1, 8])
async def test_characters_are_whole_and_both_ways_say_the_same(
    start_router: StartRouter, tokenizer: TextTokenizer, num_samples: int
) -> None:
    rng = random.Random(num_samples)
    stops = ["stop", "🌍🌍"]
    async with fake_cluster(()) as cluster, start_router(cluster) as router:
        for _ in range(12):
            said = ["".join(rng.choices(SPOKEN, k=8)) for _ in range(num_samples)]
            cluster.relay.answer, *cluster.relay.others = map(tokenizer.encode, said)
            kind = rng.choice(["chat", "text"])
            texts, _ = await both(router, kind, n=num_samples, stop=stops, max_tokens=60)
            for text, whole in zip(texts, said, strict=True):
                end = min(len(whole.partition(stop)[0]) for stop in stops)
                if len(tokenizer.encode(whole)) <= 60:
                    assert text == whole[:end]
                else:  # perhaps cut within a character
                    assert whole[:end].startswith(text.rstrip("\ufffd"))


@pytest.mark.parametrize("kind", ["chat", "text", "ids"])
async def test_no_part_of_a_stop_string_is_streamed(
    start_router: StartRouter, tokenizer: TextTokenizer, kind: str
) -> None:
    body: dict[str, Any] = {"prompt": [5, 6]} if kind == "ids" else {}
    async with (
        fake_cluster(tokenizer.encode("one END two")) as cluster,
        start_router(cluster) as router,
    ):
        texts, _ = await both(router, kind, stop=["END two", "x", "y", "zz"], **body)
        assert texts == ["one "]
        for token_id in (tokenizer.encode("D")[0], 5):
            texts, _ = await both(router, kind, stop_token_ids=[token_id], **body)
            asked = (
                cluster.prefills[0].requests[-1].sampling,
                cluster.decodes[0].requests[-1].sampling,
            )
            assert all(list(told.stop_token_ids) == [token_id] for told in asked)


async def test_the_last_text_is_not_lost_with_stop_and_stream(
    start_router: StartRouter, tokenizer: TextTokenizer
) -> None:
    """What was held back as the beginning of a stop string, when the answer ends otherwise."""
    async with fake_cluster(tokenizer.encode("one EN")) as cluster, start_router(cluster) as router:
        for kind in ("chat", "text"):
            for max_tokens in (50, len(cluster.relay.answer) - 1):
                texts, _ = await both(router, kind, stop=["END"], max_tokens=max_tokens)
                expected = "one EN" if max_tokens == 50 else "one E"
                assert texts == [expected]


async def test_every_choice_of_n_has_one_final_chunk(
    start_router: StartRouter, answer: Sequence[int]
) -> None:
    """Neither none nor two, as `both` sees to."""
    async with fake_cluster(answer) as cluster, start_router(cluster) as router:
        for kind in ("chat", "text"):
            for max_tokens, reason in ((1, "length"), (2, "length"), (50, "stop")):
                texts, chunks = await both(router, kind, n=4, max_tokens=max_tokens)
                assert len(texts) == 4
                ends = [chunk["index"] for chunk in chunks if chunk["finish_reason"] == reason]
                assert sorted(ends) == [0, 1, 2, 3]


async def test_text_offsets_with_echo(start_router: StartRouter, tokenizer: TextTokenizer) -> None:
    prompt = tokenizer.encode("<|im_start|>Größe 🌍")
    async with (
        fake_cluster(tokenizer.encode(" is 東京.")) as cluster,
        start_router(cluster) as router,
    ):
        body = {"prompt": list(prompt), "echo": True, "logprobs": 1}
        (choice,) = (await router.complete(**body)).json()["choices"]
        assert choice["text"] == "Größe 🌍 is 東京."
        told = choice["logprobs"]
        assert told["text_offset"][0] == told["text_offset"][1] == 0
        for token, offset in zip(told["tokens"][1:], told["text_offset"][1:], strict=True):
            assert token.startswith("bytes:") or choice["text"][offset:].startswith(token)
        assert len(told["tokens"]) == len(prompt) + len(cluster.relay.answer)


@pytest.mark.parametrize("hits", [(16, 0), (0, 16), (16, 32)])
async def test_cached_tokens_are_those_of_the_better_cache(
    start_router: StartRouter, answer: Sequence[int], hits: tuple[int, int]
) -> None:
    async with fake_cluster(answer) as cluster, start_router(cluster) as router:
        cluster.relay.prefill_hit, cluster.relay.decode_hit = hits
        for post in (router.chat, router.complete):
            usage = (await post()).json()["usage"]
            assert usage["prompt_tokens_details"]["cached_tokens"] == max(hits)


async def test_the_first_token_is_sampled_as_the_others(
    start_router: StartRouter, answer: Sequence[int]
) -> None:
    asked = {
        **{"temperature": 0.5, "top_p": 0.7, "top_k": 3, "min_p": 0.1, "seed": 9},
        **{"logit_bias": {"7": -100}, "presence_penalty": 1, "frequency_penalty": 0.5},
        **{"repetition_penalty": 1.2, "min_tokens": 2, "stop_token_ids": [5], "ignore_eos": True},
        **{"allowed_token_ids": [6, 7], "bad_words": ["a"]},
    }
    async with fake_cluster(answer) as cluster, start_router(cluster) as router:
        for post in (router.chat, router.complete):
            (await post(max_tokens=40, **asked)).raise_for_status()
            told = cluster.prefills[0].requests[-1].sampling
            assert told == cluster.decodes[0].requests[-1].sampling
            assert told != pb.Sampling(max_tokens=40)
            fields = {field.name for field, _ in told.ListFields()}
            assert fields >= {*asked, "max_tokens"}


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
async def test_the_prefill_leg_computes_one_token_whatever_the_limit(
    start_router: StartRouter, answer: Sequence[int], name: str
) -> None:
    async with fake_cluster(answer) as cluster, start_router(cluster) as router:
        for limit in (1, 3):
            usage = (await router.chat(**{name: limit})).json()["usage"]
            assert usage["completion_tokens"] == limit
            assert cluster.prefills[0].requests[-1].sampling.max_tokens == limit
        assert cluster.prefills[0].requests[0].ticket.transfer_id == b""
        assert len(cluster.decodes[0].requests) == 1, "one token needs no decode leg"


async def hang_for_ever(call: GenerateCall) -> None:
    await call.relay.commit(await call.reserve())
    await call.hang()


async def test_a_request_that_is_not_streamed_ends_with_its_client(
    start_router: StartRouter, answer: Sequence[int]
) -> None:
    async with fake_cluster(answer) as cluster, start_router(cluster, inactivity_s=5.0) as router:
        cluster.decodes[0].scripts.append(hang_for_ever)
        async with raw_post(router, stream=False):
            await until(lambda: bool(cluster.decodes[0].requests))
        await until(lambda: cluster.relay.num_open_calls == 0, timeout_s=1)


async def test_gauges_fall_to_zero_when_all_clients_leave_at_once(
    start_router: StartRouter, answer: Sequence[int]
) -> None:
    num_clients = 32
    async with fake_cluster(answer) as cluster, start_router(cluster, inactivity_s=5.0) as router:
        cluster.decodes[0].scripts.extend([some_tokens_and_hang] * num_clients)
        async with AsyncExitStack() as clients:
            for index in range(num_clients):
                await clients.enter_async_context(raw_post(router, stream=bool(index % 2)))
            await until(
                lambda: router.metric("baton_request_output_tokens_total") == 3 * num_clients
            )
            assert router.metric("baton_requests_in_flight") == num_clients
        await until(lambda: router.metric("baton_requests_in_flight") == 0)
        cancelled = router.metric("baton_requests_total", outcome="cancelled")
        assert cancelled == num_clients
        await until(lambda: cluster.relay.num_open_calls == 0)
        assert (await router.complete()).json()["choices"][0]["text"] == ANSWER


async def test_streams_beside_each_other_do_not_mix(
    start_router: StartRouter, tokenizer: TextTokenizer
) -> None:
    async with (
        fake_cluster(tokenizer.encode("🏃‍♀️ 한국어 🌍")) as cluster,
        start_router(cluster) as router,
    ):
        answers = await asyncio.gather(*(both(router, "text", prompt=f"{i}") for i in range(8)))
        assert [texts for texts, _ in answers] == [["🏃‍♀️ 한국어 🌍"]] * 8
