"""Structured outputs at the router: what is asked goes to the workers as a grammar, and what no
worker could obey is refused at once, while others are served."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import grpc
import pytest

from router import grammar_check
from router.errors import BadRequest
from router.grammar_check import GrammarCheck
from router.grammar_process import GrammarProcess, Verdict
from router.grammar_sandbox import probe
from router.structured_output import Wanted
from router.tokenizer import TextTokenizer
from runtime.grammar import GrammarError, Vocabulary, of_choices, of_regex
from tests.grammars import FORMS
from tests.router.bombs import BOMBS
from tests.router.conftest import RunningRouter, StartRouter
from tests.router.fake_workers import FakeCluster, GenerateCall, PrefillCall, fake_cluster, until
from tests.router.test_refusals import error_of


@pytest.fixture
async def check(tokenizer: TextTokenizer) -> AsyncIterator[GrammarCheck]:
    check = GrammarCheck(tokenizer.vocabulary)
    yield check
    check.close()


def grammars_of(cluster: FakeCluster) -> list[str]:
    """Of the last request, as both workers got it."""
    return [worker.requests[-1].sampling.grammar for worker in cluster.workers]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
async def test_both_workers_get_the_grammar(
    start_router: StartRouter, answer: tuple[int, ...], form: Any
) -> None:
    async with fake_cluster(answer) as cluster, start_router(cluster) as router:
        assert (await router.complete(**form.fields)).status_code == 200
        assert grammars_of(cluster) == [form.grammar] * 2
        assert (await router.complete()).status_code == 200
        assert grammars_of(cluster) == ["", ""]


async def test_a_strict_schema_is_kept_to_the_letter(
    start_router: StartRouter, answer: tuple[int, ...]
) -> None:
    schema = {"type": "object", "not": {"required": ["a"]}}
    async with fake_cluster(answer) as cluster, start_router(cluster) as router:
        for strict, status in ((True, 400), (False, 200), (None, 200)):
            named = {"name": "n", "schema": schema, "strict": strict}
            form = {"type": "json_schema", "json_schema": named}
            response = await router.chat(response_format=form)
            assert response.status_code == status
            if strict:
                error = error_of(response, 400)
                assert error["param"] == "response_format"
                assert "not" in str(error["message"])


@pytest.mark.parametrize("names", [list(BOMBS)[i::3] for i in range(3)], ids=str)
async def test_bombs_are_refused_within_a_second_while_a_stream_flows(
    start_router: StartRouter, answer: tuple[int, ...], names: list[str]
) -> None:
    gaps: list[float] = []
    is_over = asyncio.Event()

    async def drip(call: GenerateCall) -> None:
        await call.relay.commit(await call.reserve())
        index = 0
        while not is_over.is_set() and index < 80:
            await call.tokens(index, [answer[index % len(answer)]])
            await asyncio.sleep(0.02)
            index += 1
        await call.finish()

    async with fake_cluster(answer) as cluster, start_router(cluster) as router:
        cluster.decodes[0].scripts.append(drip)
        stream = asyncio.create_task(_watch(router, gaps))
        await until(lambda: len(gaps) >= 5)
        for name in names:
            began = time.monotonic()
            response = await router.complete(**BOMBS[name])
            assert time.monotonic() - began < 1.0, name
            error = error_of(response, 400)
            assert error["param"] is not None, name
            assert error["param"] in str(error["message"]), name
        is_over.set()
        await stream
        assert max(gaps) < 0.25
        assert len(cluster.decodes[0].requests) == 1  # the stream's


async def _watch(router: RunningRouter, gaps: list[float]) -> None:
    body = {"model": "tiny", "prompt": "Hi", "max_tokens": 95, "stream": True}
    async with router.http.stream("POST", "/v1/completions", json=body) as response:
        last = time.monotonic()
        async for _ in response.aiter_bytes():
            gaps.append(time.monotonic() - last)
            last = time.monotonic()


@pytest.mark.parametrize(
    ("fields", "param", "reason"),
    [
        ({"guided_regex": "(a"}, "guided_regex", "unclosed"),
        ({"guided_json": {"type": "strin"}}, "guided_json", "strin"),
        ({"guided_json": "{"}, "guided_json", "not JSON"),
        ({"guided_grammar": "start: b"}, "guided_grammar", '"b"'),
        ({"structured_outputs": {"json": False}}, "structured_outputs.json", "neither"),
        ({"structured_outputs": {"regex": "a(?=b)"}}, "structured_outputs.regex", "look-ahead"),
    ],
)
async def test_what_does_not_compile_is_refused_with_the_reason(
    start_router: StartRouter, fields: dict[str, Any], param: str, reason: str
) -> None:
    async with fake_cluster(()) as cluster, start_router(cluster) as router:
        error = error_of(await router.complete(**fields), 400)
        assert error["param"] == param
        assert reason in str(error["message"])
        assert not cluster.decodes[0].requests


async def test_a_worker_that_refuses_a_grammar_is_believed(
    start_router: StartRouter, answer: tuple[int, ...]
) -> None:
    """No other worker is asked: it would say the same."""

    async def refuse(call: GenerateCall | PrefillCall) -> None:
        await call.fail(grpc.StatusCode.INVALID_ARGUMENT, "the grammar cannot go on")

    async with fake_cluster(answer, num_decodes=2) as cluster, start_router(cluster) as router:
        cluster.decodes[0].scripts.append(refuse)
        cluster.decodes[1].scripts.append(refuse)
        error = error_of(await router.complete(guided_choice=["a"]), 400)
        assert error["message"] == "the grammar cannot go on"
        assert sum(len(worker.requests) for worker in cluster.decodes) == 1


async def test_what_takes_too_long_is_refused(
    check: GrammarCheck, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_check, "MAX_SECONDS", 0.05)
    release = threading.Event()

    def write() -> str:
        release.wait()
        return of_regex("a")

    with pytest.raises(BadRequest, match="too long"):
        await check.text_of(Wanted("guided_regex", write))
    release.set()


async def test_who_finds_no_thread_free_may_come_again(
    check: GrammarCheck, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_check, "MAX_SECONDS", 0.05)
    release = threading.Event()

    def write() -> str:
        release.wait()
        return of_regex("a")

    asked = [check.text_of(Wanted("guided_regex", write)) for _ in range(3)]
    outcomes = await asyncio.gather(*asked, return_exceptions=True)
    release.set()
    assert sorted(type(outcome).__name__ for outcome in outcomes) == [
        "BadRequest",
        "BadRequest",
        "CompilersBusy",
    ]
    assert await check.text_of(Wanted("guided_regex", lambda: of_regex("b"))) == of_regex("b")


async def test_each_grammar_is_compiled_once(
    check: GrammarCheck, monkeypatch: pytest.MonkeyPatch
) -> None:
    probed: list[str] = []

    def verdict_on(process: GrammarProcess, text: str) -> Verdict:
        probed.append(text)
        return Verdict("so says the test" if text == of_choices(["bad"]) else None)

    monkeypatch.setattr(GrammarProcess, "verdict_on", verdict_on)
    monkeypatch.setattr(grammar_check, "NUM_KEPT", 2)
    for name in ("a", "a", "bad", "bad", "c", "bad", "a"):
        asked = check.text_of(Wanted("guided_choice", partial(of_choices, [name])))
        if name == "bad":
            with pytest.raises(BadRequest, match="so says the test"):
                await asked
        else:
            assert await asked == of_choices([name])
    assert probed == [of_choices([name]) for name in ("a", "bad", "c", "a")]


async def test_without_a_vocabulary_all_are_refused() -> None:
    check = GrammarCheck(None)
    with pytest.raises(BadRequest, match="tokenizer"):
        await check.text_of(Wanted("guided_choice", lambda: of_choices(["a"])))
    check.close()


def test_a_grammar_that_needs_every_token_is_sound(tokenizer: TextTokenizer) -> None:
    assert isinstance(tokenizer.vocabulary, Vocabulary)
    for form in FORMS:
        probe(tokenizer.vocabulary, form.grammar)
    with pytest.raises(GrammarError):
        probe(tokenizer.vocabulary, of_regex("(a{1000}){1000}"))
