"""A worker dies behind each token in turn, and the client's answer is the undisturbed one: text cut
at a stop string that straddles the break, logprobs, usage, several samples at once.
"""

import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import grpc
import pytest

from tests.router.conftest import RunningRouter, StartRouter
from tests.router.fake_workers import GenerateCall, fake_cluster, until
from tests.router.test_app import events_of


def die_behind(num_tokens: int) -> Callable[[GenerateCall], Awaitable[None]]:
    """Of each sample so many tokens come, one by one, and then nothing."""

    has_died = False

    async def die(call: GenerateCall) -> None:
        nonlocal has_died
        if has_died:
            return await call.run_happily()
        has_died = True
        await call.relay.commit(await call.reserve())
        for index in range(num_tokens):
            for sample in range(len(call.request.samples)):
                await call.tokens(index, [call.relay.answer_of(sample)[index]], sample=sample)
        return await call.fail(grpc.StatusCode.UNAVAILABLE)

    return die


async def streamed(router: RunningRouter, path: str, body: dict[str, Any]) -> object:
    """Of each choice its text, why it ended, and its logprobs; and all counts that were told."""
    options = {"stream": True, "stream_options": {"include_usage": True}}
    post = router.chat if path == "chat" else router.complete
    *chunks, done = events_of((await post(**options, **body)).text)
    assert done == "[DONE]"
    choices: dict[int, list[Any]] = {}
    usages = []
    for chunk in map(json.loads, chunks):
        assert "error" not in chunk
        usages += [chunk["usage"]] if chunk["usage"] else []
        for told in chunk["choices"]:
            choice = choices.setdefault(told["index"], ["", [], []])
            assert not choice[1], "nothing follows the end"
            choice[0] += told["delta"].get("content", "") if path == "chat" else told["text"]
            choice[1] += [told["finish_reason"]] if told["finish_reason"] else []
            logprobs = told.get("logprobs") or {}
            choice[2] += logprobs.get("content") or logprobs.get("token_logprobs") or []
    return choices, usages


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "stop": ("completions", {"stop": ["is it"]}),
    "logprobs": ("completions", {"logprobs": 2, "stop": ["🌍 is"]}),
    "chat with logprobs": ("chat", {"logprobs": True, "top_logprobs": 2}),
    "samples": ("completions", {"n": 3, "stop": ["is it"], "temperature": 1}),
}


@pytest.mark.parametrize("case", CASES)
async def test_it_goes_on_behind_each_token(
    start_router: StartRouter, answer: Sequence[int], case: str
) -> None:
    path, body = CASES[case]
    async with (
        fake_cluster(answer, num_decodes=2) as cluster,
        start_router(cluster, status_interval_s=0.01) as router,
    ):
        cluster.relay.others = [answer[1:], answer[2:]]
        expected = await streamed(router, path, body)
        for num_tokens in range(len(answer) - 2):
            await until(lambda: all(worker.is_ready for worker in router.router.workers.decodes))
            dies = die_behind(num_tokens)
            for worker in cluster.decodes:
                worker.scripts.append(dies)
            assert await streamed(router, path, body) == expected, num_tokens
            for worker in cluster.decodes:  # behind a stop string nobody else is asked
                worker.scripts.clear()
        retries = router.metric("baton_retries_total", leg="decode", reason="unavailable")
        assert retries >= len(answer) / 2
