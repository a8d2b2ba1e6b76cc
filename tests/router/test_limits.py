"""What one request may ask for, as the operator says: refused by name, with the numbers."""

from typing import Any

import pytest

from router.config import RouterConfig
from router.errors import BadRequest
from router.limits import Limits
from runtime import flags
from tests.router.conftest import StartRouter
from tests.router.fake_workers import fake_cluster
from tests.router.test_refusals import error_of

LIMITS = Limits(
    max_prompts=2,
    max_messages=2,
    max_stops=1,
    max_logprobs=3,
    max_schema_nbytes=60,
    max_schema_depth=5,
)
LONG = {"type": "string", "pattern": "ü" * 30}
DEEP = {"a": {"b": {"c": {"d": {"e": 1}}}}}


def schemas(schema: object) -> dict[str, dict[str, Any]]:
    named = {"name": "n", "schema": schema}
    return {
        "response_format": {"response_format": {"type": "json_schema", "json_schema": named}},
        "structured_outputs.json": {"structured_outputs": {"json": schema}},
        "guided_json": {"guided_json": schema},
        "tools.0.function.parameters": {"tools": [{"function": {"parameters": schema}}]},
    }


@pytest.mark.parametrize(
    ("body", "numbers"),
    [
        ({"prompt": ["a"] * 3}, ("3", "2")),
        ({"prompt": [[1]] * 3}, ("3", "2")),
        ({"messages": [{}] * 3}, ("3", "2")),
        ({"stop": ["a", "b"]}, ("2", "1")),
        ({"logprobs": 4}, ("4", "3")),
        ({"top_logprobs": 4}, ("4", "3")),
        ({"prompt_logprobs": 4}, ("4", "3")),
    ],
    ids=str,
)
def test_one_too_many(body: dict[str, Any], numbers: tuple[str, str]) -> None:
    with pytest.raises(BadRequest) as refusal:
        LIMITS.check(body)
    (name,) = body
    assert refusal.value.param == name
    assert all(text in refusal.value.message for text in (name, *numbers))


@pytest.mark.parametrize(
    ("schema", "number"), [(LONG, "60"), (DEEP, "5"), ('{"a":' * 6 + "1" + "}" * 6, "5")]
)
def test_a_schema_that_is_too_long_or_too_deep(schema: object, number: str) -> None:
    for param, body in schemas(schema).items():
        with pytest.raises(BadRequest) as refusal:
            LIMITS.check(body)
        assert refusal.value.param == param
        assert number in refusal.value.message


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": ["a"] * 2, "stop": "long string", "logprobs": 3, "top_logprobs": None},
        {"prompt": [1] * 99, "stop": ["a"], "messages": [{}] * 2},
        {"prompt": 7, "messages": "x", "stop": 3, "logprobs": True, "tools": [3, None]},
        {"response_format": "x", "structured_outputs": [], "guided_json": "{", "tools": {}},
        {"guided_json": {"a": {"b": {"c": {"d": 1}}}}},
    ],
    ids=str,
)
def test_what_is_allowed_or_somebody_elses_to_refuse(body: dict[str, Any]) -> None:
    LIMITS.check(body)


async def test_the_router_obeys_its_flags(start_router: StartRouter) -> None:
    changes = {"max_prompts": 2, "max_messages": 1, "max_stops": 1, "max_logprobs": 1}
    async with fake_cluster(()) as cluster, start_router(cluster, **changes) as router:
        for body in ({"prompt": ["a"] * 3}, {"stop": ["a", "b"]}, {"logprobs": 2}):
            error = error_of(await router.complete(**body), 400)
            assert (error["param"], error["code"]) == (next(iter(body)), "limit_exceeded")
        messages = [{"role": "user", "content": "Hi"}] * 2
        assert error_of(await router.chat(messages=messages), 400)["param"] == "messages"
        assert not cluster.decodes[0].requests


def test_no_flag_lifts_a_bound_that_holds_for_all() -> None:
    needed = ["--model-path", "x", "--served-model-name", "x"]
    config = flags.parse(
        RouterConfig, [*needed, "--max-schema-nbytes", "64KiB"], prog="", description="", environ={}
    )
    assert config.max_schema_nbytes == 64 << 10
    for flag, value in (("--max-stops", "17"), ("--max-schema-nbytes", "1MiB")):
        with pytest.raises(SystemExit):
            flags.parse(RouterConfig, [*needed, flag, value], prog="", description="", environ={})
