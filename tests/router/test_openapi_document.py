"""Our OpenAPI document held against our answers by schemathesis, which draws requests that fit the
document and requests that do not. Bounded here; its own command, with all phases, is marked long.
"""

import asyncio
import json
import re
import sys
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import schemathesis
from fastapi.routing import APIRoute
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.core.failures import FailureGroup
from schemathesis.core.result import Ok
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)

from tests.router.conftest import StartRouter
from tests.router.fake_workers import FakeCluster, fake_cluster

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    negative_data_rejection,
]
NUM_EXAMPLES = 12
"""Of each operation and mode."""

ENDLESS = "/v1/cluster/events"
"""Who asks for it is told for as long as they listen."""

Statuses = dict[tuple[str, GenerationMode], Counter[int]]


def attack(url: str, document: dict[str, Any]) -> Statuses:
    """What came back for each operation. Raises schemathesis' failures."""
    statuses: Statuses = {}
    schema = schemathesis.openapi.from_dict(document).exclude(path=ENDLESS)
    for found in schema.get_all_operations():
        assert isinstance(found, Ok)
        operation = found.ok()
        for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
            seen = statuses[operation.label, mode] = Counter[int]()
            try:
                _attack(url, operation, mode, seen)
            except Unsatisfiable:
                assert mode is GenerationMode.NEGATIVE
    return statuses


def _attack(url: str, operation: Any, mode: GenerationMode, seen: Counter[int]) -> None:
    @hypothesis.settings(
        max_examples=NUM_EXAMPLES,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
    def send(case: schemathesis.Case[Any]) -> None:
        response = case.call_and_validate(base_url=url, checks=CHECKS, timeout=10)
        seen[response.status_code] += 1

    send()


@asynccontextmanager
async def roomy_cluster(answer: Sequence[int]) -> AsyncIterator[FakeCluster]:
    """Prompts of any length fit: else most of those that are drawn would not."""
    async with fake_cluster(answer) as cluster:
        for worker in cluster.workers:
            worker.status.max_model_len = 1 << 20
        yield cluster


async def test_answers_are_what_the_document_says(
    start_router: StartRouter, answer: Sequence[int]
) -> None:
    async with roomy_cluster(answer) as cluster, start_router(cluster) as router:
        document = (await router.http.get("/openapi.json")).json()
        statuses = await asyncio.to_thread(attack, router.url, document)
    for path in ("/v1/chat/completions", "/v1/completions"):
        for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
            assert statuses[f"POST {path}", mode].total() >= NUM_EXAMPLES


MESSAGES = [{"role": "user", "content": "Hi"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CHATS: list[dict[str, Any]] = [
    {},
    {"n": 2, "logprobs": True, "top_logprobs": 2, "seed": 1, "stop": ["x"], "user": "me"},
    {"stream_options": {"include_usage": True}, "temperature": 0, "metadata": None},
    {"tools": [TOOL], "tool_choice": "auto"},
    {"response_format": {"type": "json_object"}},
]
COMPLETIONS: list[dict[str, Any]] = [
    {"prompt": ["a", "b"], "logprobs": 2, "n": 2},
    {"prompt": [[1, 2], [3]], "max_tokens": 3, "top_k": 3},
    {"prompt": "a", "guided_choice": ["a"], "suffix": None},
]


def ask(url: str, document: dict[str, Any], path: str, *bodies: dict[str, Any]) -> None:
    operation = schemathesis.openapi.from_dict(document)[path]["POST"]
    for body in bodies:
        case = operation.Case(body={"model": "tiny", **body}, media_type="application/json")
        response = case.call_and_validate(base_url=url, checks=CHECKS, timeout=10)
        assert response.status_code == 200, body


@pytest.mark.parametrize("stream", [False, True])
async def test_answers_fit_and_one_unlike_the_document_is_found(
    start_router: StartRouter, answer: Sequence[int], stream: bool
) -> None:
    """Of a stream, each event is held against it."""
    streaming = {"stream": True} if stream else {}
    async with roomy_cluster(answer) as cluster, start_router(cluster) as router:
        document = (await router.http.get("/openapi.json")).json()
        chats = [
            {"messages": MESSAGES, **chat, **streaming}
            for chat in CHATS
            if stream or "stream_options" not in chat
        ]
        texts = [{**text, **streaming} for text in COMPLETIONS]
        await asyncio.to_thread(ask, router.url, document, "/v1/chat/completions", *chats)
        await asyncio.to_thread(ask, router.url, document, "/v1/completions", *texts)
        wrong = json.loads(json.dumps(document).replace("chat.completion", "chat.answer"))
        with pytest.raises(FailureGroup):
            await asyncio.to_thread(ask, router.url, wrong, "/v1/chat/completions", chats[0])


async def test_the_document_knows_every_route(start_router: StartRouter) -> None:
    async with fake_cluster(()) as cluster, start_router(cluster) as router:
        document = (await router.http.get("/openapi.json")).json()
        for route in router.server.app.routes:
            if isinstance(route, APIRoute):
                for method in {method.lower() for method in route.methods or ()} - {"head"}:
                    operation = document["paths"][route.path_format][method]
                    assert operation["responses"]["200"]["content"]
                    assert "422" not in operation["responses"]
                    assert ("requestBody" in operation) == (method == "post")
        assert (await router.http.get("/docs")).status_code == 404


@pytest.mark.long
async def test_its_own_command_finds_nothing(
    start_router: StartRouter, answer: Sequence[int], tmp_path: Path
) -> None:
    async with roomy_cluster(answer) as cluster, start_router(cluster) as router:
        process = await asyncio.create_subprocess_exec(
            *(str(Path(sys.executable).with_name("schemathesis")), "run"),
            f"{router.url}/openapi.json",
            *("--checks", ",".join(check.__name__ for check in CHECKS)),
            *("--exclude-path", ENDLESS),
            *("--phases", "examples,coverage,fuzzing", "--max-examples", "150"),
            *("--continue-on-failure", "--no-color", "--generation-database", "none"),
            cwd=tmp_path,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        told, _ = await process.communicate()
        assert process.returncode == 0, told.decode()
        assert re.search(rb"(\d{3,}) generated, \1 passed", told), told.decode()
