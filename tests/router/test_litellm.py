"""LiteLLM as a client: it maps our answers, streams and errors onto its own."""

from typing import Any

import pytest

litellm = pytest.importorskip("litellm", reason="needs the extra `clients` (litellm)")

from tests.router.served_fakes import ANSWER  # noqa: E402 (where the package is)

pytestmark = pytest.mark.filterwarnings("default")  # they are the library's own

MESSAGES = [{"role": "user", "content": "Capital of France?"}]


@pytest.fixture
def served(served_url: str) -> dict[str, Any]:
    return {
        "model": "openai/tiny",
        "api_base": f"{served_url}/v1",
        "api_key": "none",
        "max_retries": 0,
        "messages": MESSAGES,
    }


def test_a_chat(served: dict[str, Any]) -> None:
    answer = litellm.completion(**served, temperature=0, logprobs=True, top_logprobs=1)
    assert answer.choices[0].message.content == ANSWER
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens == len(answer.choices[0].logprobs.content)


def test_a_stream(served: dict[str, Any]) -> None:
    chunks = list(litellm.completion(**served, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == ANSWER
    assert [chunk.usage for chunk in chunks if getattr(chunk, "usage", None)][-1].total_tokens > 0


async def test_asynchronously(served: dict[str, Any]) -> None:
    answer = await litellm.acompletion(**served)
    assert answer.choices[0].message.content == ANSWER


def test_a_text_completion(served: dict[str, Any]) -> None:
    served = {**served, "model": "text-completion-openai/tiny", "prompt": "Hi"}
    del served["messages"]
    assert litellm.text_completion(**served).choices[0].text == ANSWER


def test_errors(served: dict[str, Any]) -> None:
    with pytest.raises(litellm.BadRequestError):
        litellm.completion(**served, temperature=9)
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(**{**served, "messages": [{"role": "user", "content": "a " * 99_000}]})
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(**{**served, "model": "openai/other"})
