"""Both endpoints over a real socket: whole answers, streams, usage, stop strings, many prompts."""

import json
from collections.abc import Sequence

import pytest

from protos import serving_pb2 as pb
from tests.router.conftest import ANSWER, RunningRouter, StartRouter
from tests.router.fake_workers import GenerateCall, fake_cluster, until


def events_of(text: str) -> list[str]:
    assert text.endswith("\n\n")
    return [line.removeprefix("data: ") for line in text.removesuffix("\n\n").split("\n\n")]


async def test_a_chat_is_answered(start_router: StartRouter, answer: Sequence[int]) -> None:
    async with fake_cluster(answer) as cluster, start_router(cluster) as router:
        response = await router.chat()

        assert response.status_code == 200, response.text
        body = response.json()
        (choice,) = body["choices"]
        assert choice["message"] == {"role": "assistant", "content": ANSWER, "refusal": None}
        assert choice["finish_reason"] == "stop"
        num_prompt = len(cluster.decodes[0].requests[0].prompt_token_ids)
        assert body["usage"] == {
            "prompt_tokens": num_prompt,
            "prompt_tokens_details": {"cached_tokens": 0},
            "completion_tokens": len(answer),
            "total_tokens": num_prompt + len(answer),
        }
        assert body["model"] == "tiny"
        assert response.headers["x-baton-request-id"] in body["id"]
        assert not cluster.decodes[0].requests[0].local_prefill


@pytest.mark.parametrize("include_usage", [False, True])
async def test_a_chat_is_streamed(
    start_router: StartRouter, answer: Sequence[int], include_usage: bool
) -> None:
    async with fake_cluster(answer) as cluster, start_router(cluster) as router:
        options = {"stream_options": {"include_usage": True}} if include_usage else {}
        response = await router.chat(stream=True, **options)

        assert response.headers["content-type"].startswith("text/event-stream")
        *chunks, done = events_of(response.text)
        assert done == "[DONE]"
        bodies = [json.loads(chunk) for chunk in chunks]
        if include_usage:
            last = bodies.pop()
            assert last["choices"] == []
            assert last["usage"]["completion_tokens"] == len(answer)
            assert all(body["usage"] is None for body in bodies)
        else:
            assert all("usage" not in body for body in bodies)
        choices = [body["choices"][0] for body in bodies]
        assert choices[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(choice["delta"].get("content", "") for choice in choices) == ANSWER
        assert all("�" not in chunk for chunk in chunks)
        assert [choice["finish_reason"] for choice in choices[:-1]] == [None] * (len(choices) - 1)
        assert choices[-1]["finish_reason"] == "stop"
        assert choices[-1]["delta"] == {}
        assert len({body["id"] for body in bodies}) == 1


async def test_a_stop_string_across_tokens(
    start_router: StartRouter, answer: Sequence[int]
) -> None:
    async with fake_cluster(answer) as cluster, start_router(cluster) as router:

        async def endless(call: GenerateCall) -> None:
            await call.relay.commit(await call.reserve())
            await call.tokens(0, answer)
            await call.hang()

        for stream in (False, True):
            cluster.decodes[0].scripts.append(endless)
            response = await router.complete(stop=["🌍 is", "nowhere"], stream=stream)
            if stream:
                bodies = [json.loads(event) for event in events_of(response.text)[:-1]]
                choices = [body["choices"][0] for body in bodies]
            else:
                choices = response.json()["choices"]
                assert response.json()["usage"]["completion_tokens"] < len(answer)
            assert "".join(choice["text"] for choice in choices) == "Paris "
            assert choices[-1]["finish_reason"] == "stop"


async def test_each_prompt_gives_a_choice(start_router: StartRouter, answer: Sequence[int]) -> None:
    async with (
        fake_cluster(answer, num_decodes=2) as cluster,
        start_router(cluster) as router,
    ):
        for prompt in (["a", "b", "c"], [[5], [6], [7]]):
            response = await router.complete(prompt=prompt)
            choices = response.json()["choices"]
            assert [choice["index"] for choice in choices] == [0, 1, 2]
            assert {choice["text"] for choice in choices} == {ANSWER}

            response = await router.complete(prompt=prompt, stream=True)
            texts = ["", "", ""]
            for event in events_of(response.text)[:-1]:
                (choice,) = json.loads(event)["choices"]
                texts[choice["index"]] += choice["text"]
            assert texts == [ANSWER] * 3
        ids = [request.request_id for request in cluster.prefills[0].requests]
        assert len(set(ids)) == 12


async def test_max_tokens_ends_with_length(
    start_router: StartRouter, answer: Sequence[int]
) -> None:
    async with fake_cluster(answer) as cluster, start_router(cluster) as router:
        for max_tokens in (1, 2):
            body = (await router.complete(max_tokens=max_tokens)).json()
            assert body["choices"][0]["finish_reason"] == "length"
            assert body["usage"]["completion_tokens"] == max_tokens


async def test_an_answer_cut_within_a_character(
    start_router: StartRouter, answer: Sequence[int]
) -> None:
    """The end tells what there is, as the whole decoding does; nothing earlier does."""
    async with fake_cluster(answer) as cluster, start_router(cluster) as router:
        texts = []
        for max_tokens in range(1, len(answer)):
            response = await router.complete(max_tokens=max_tokens, stream=True)
            pieces = [
                json.loads(event)["choices"][0]["text"] for event in events_of(response.text)[:-1]
            ]
            assert not any("�" in piece for piece in pieces[:-1])
            texts.append("".join(pieces))
        assert any(text.endswith("�") for text in texts)


async def test_models(start_router: StartRouter) -> None:
    async with fake_cluster(()) as cluster, start_router(cluster) as router:
        models = (await router.http.get("/v1/models")).json()
        assert [model["id"] for model in models["data"]] == ["tiny"]
        assert (await router.http.get("/v1/models/tiny")).json() == models["data"][0]
        missing = await router.http.get("/v1/models/gpt-4")
        assert missing.status_code == 404
        assert missing.json()["error"]["code"] == "model_not_found"


async def test_readiness(start_router: StartRouter) -> None:
    async with fake_cluster(()) as cluster, start_router(cluster) as router:
        assert (await router.http.get("/healthz")).status_code == 200
        await until(lambda: router.router.dispatcher.is_ready)
        for path in ("/readyz", "/health"):
            assert (await router.http.get(path)).status_code == 200
        await cluster.prefills[0].kill()
        await until(lambda: not router.router.dispatcher.is_ready)
        for path in ("/readyz", "/health"):
            assert (await router.http.get(path)).status_code == 503
        assert (await router.http.get("/healthz")).status_code == 200


async def test_without_a_prefill_worker_by_an_operators_word_it_is_ready(
    start_router: StartRouter, answer: Sequence[int]
) -> None:
    async with fake_cluster(answer) as cluster, start_router(cluster) as router:
        workers = router.router.workers
        for serves, num_prefills in (([pb.ROLE_DECODE], 0), ([pb.ROLE_PREFILL], 1)):
            cluster.prefills[0].status.serves[:] = serves
            await until(lambda num=num_prefills: len(workers.prefills) == num)  # type: ignore[misc]
            await until(lambda: router.router.dispatcher.is_ready)
            assert (await router.http.get("/readyz")).status_code == 200
            assert (await router.complete()).status_code == 200
        reasons = [request.local_prefill_reason for request in cluster.decodes[0].requests]
        assert reasons == ["no_prefill_worker", ""]


async def test_metrics(start_router: StartRouter, answer: Sequence[int]) -> None:
    async with fake_cluster(answer) as cluster, start_router(cluster) as router:
        await router.complete()
        await router.complete(temperature=9)
        text = (await router.http.get("/metrics")).text
        for name, count in expected_counts(answer).items():
            assert f"{name} {count}" in text.splitlines(), text
        assert "# HELP baton_time_to_first_token_seconds" in text
        assert_few_families_lack_help(text)


def expected_counts(answer: Sequence[int]) -> dict[str, float]:
    return {
        'baton_requests_total{outcome="completed"}': 1.0,
        'baton_requests_total{outcome="rejected"}': 1.0,
        "baton_requests_in_flight": 0.0,
        "baton_time_to_first_token_seconds_count": 1.0,
        "baton_time_per_output_token_seconds_count": 1.0,
        "baton_request_duration_seconds_count": 2.0,
        "baton_request_output_tokens_total": float(len(answer)),
        'baton_workers_ready{role="decode"}': 1.0,
    }


def assert_few_families_lack_help(text: str) -> None:
    helped = {line.split()[2] for line in text.splitlines() if line.startswith("# HELP")}
    typed = {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")}
    assert typed == helped


async def test_colocated_needs_no_prefill_worker(
    start_router: StartRouter, answer: Sequence[int]
) -> None:
    async with (
        fake_cluster(answer, num_prefills=0) as cluster,
        start_router(cluster, mode="colocated") as router,
    ):
        assert (await router.http.get("/readyz")).status_code == 200
        await check_answer(router)
        assert router.metric("baton_local_prefills_total", reason="colocated") == 1


async def check_answer(router: RunningRouter) -> None:
    response = await router.complete()
    assert response.json()["choices"][0]["text"] == ANSWER
