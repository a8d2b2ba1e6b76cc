"""Requests of every kind, and their answers as clients see them, streamed or whole, to compare."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.e2e.cluster import MODEL_NAME

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"

SCHEMA = {"type": "array", "items": {"type": "integer"}, "minItems": 1000}


@dataclass(frozen=True)
class Kind:
    """A request, of `max_tokens` that the caller chooses."""

    path: str
    body: Mapping[str, Any]
    is_streaming: bool = True


HOT = {"temperature": 1.0, "ignore_eos": True}

KINDS: dict[str, Kind] = {
    "greedy": Kind(COMPLETION, {"temperature": 0, "ignore_eos": True}),
    "n": Kind(COMPLETION, {**HOT, "n": 3, "seed": 5}),
    "best_of": Kind(COMPLETION, {**HOT, "n": 2, "best_of": 3, "seed": 6}, is_streaming=False),
    "logprobs": Kind(COMPLETION, {**HOT, "logprobs": 2, "seed": 7}),
    "chat_logprobs": Kind(CHAT, {**HOT, "n": 2, "logprobs": True, "top_logprobs": 3, "seed": 8}),
    "penalties": Kind(
        CHAT,
        {
            **HOT,
            "seed": 9,
            "presence_penalty": 0.7,
            "frequency_penalty": 1.1,
            "repetition_penalty": 1.2,
        },
    ),
    "grammar": Kind(
        CHAT,
        {
            "temperature": 1.0,
            "seed": 10,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "numbers", "schema": SCHEMA},
            },
        },
    ),
    # Behind min_tokens the first vowel ends it.
    "stop": Kind(COMPLETION, {**HOT, "seed": 11, "min_tokens": 90, "stop": [*"aeiou"]}),
    # The end id is all but certain as soon as it may come.
    "min_tokens": Kind(COMPLETION, {"temperature": 0, "min_tokens": 90, "logit_bias": {"2": 100}}),
}


def body_of(kind: Kind, prompt: str, max_tokens: int) -> dict[str, Any]:
    asked: dict[str, Any] = {"prompt": prompt}
    if kind.path == CHAT:
        asked = {"messages": [{"role": "user", "content": prompt}]}
    if kind.is_streaming:
        asked |= {"stream": True, "stream_options": {"include_usage": True}}
    return {"model": MODEL_NAME, "max_tokens": max_tokens, **asked, **kind.body}


@dataclass
class Choice:
    text: str = ""
    finish_reason: str = ""
    tokens: list[str] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


@dataclass
class Answer:
    """What came of a request, put together."""

    status: int = 0
    headers: Mapping[str, str] = field(default_factory=dict)
    choices: dict[int, Choice] = field(default_factory=dict)
    usage: list[Mapping[str, Any]] = field(default_factory=list)
    error: Mapping[str, Any] | None = None
    num_events: int = 0
    is_done: bool = False

    def told(self) -> tuple[object, ...]:
        """What must be the same whatever happened meanwhile."""
        choices = {
            index: (one.text, one.finish_reason, one.tokens) for index, one in self.choices.items()
        }
        counts = [(one["prompt_tokens"], one["completion_tokens"]) for one in self.usage]
        return (self.status, self.error, self.is_done, choices, counts)

    def logprobs(self) -> list[float]:
        return [value for _, one in sorted(self.choices.items()) for value in one.logprobs]

    def take(self, document: Mapping[str, Any]) -> None:
        if "error" in document:
            self.error = document["error"]
            return
        if document.get("usage"):
            self.usage.append(document["usage"])
        for told in document["choices"]:
            choice = self.choices.setdefault(told["index"], Choice())
            said = told.get("delta") or told.get("message") or {"content": told.get("text")}
            choice.text += said.get("content") or ""
            choice.finish_reason += told.get("finish_reason") or ""
            _take_logprobs(choice, told.get("logprobs") or {})


def _take_logprobs(choice: Choice, told: Mapping[str, Any]) -> None:
    entries: Sequence[Mapping[str, Any]] = told.get("content") or ()
    choice.tokens += told.get("tokens") or [one["token"] for one in entries]
    choice.logprobs += told.get("token_logprobs") or [one["logprob"] for one in entries]


async def ask(
    client: httpx.AsyncClient, kind: Kind, prompt: str, max_tokens: int, answer: Answer
) -> Answer:
    """Fills the answer as it comes. Raises what httpx raises where a stream breaks off."""
    body = body_of(kind, prompt, max_tokens)
    async with client.stream("POST", kind.path, json=body) as response:
        answer.status, answer.headers = response.status_code, response.headers
        if "event-stream" not in response.headers["content-type"]:
            answer.take(json.loads(await response.aread()))
            answer.is_done = True
            return answer
        async for line in response.aiter_lines():
            if line == "data: [DONE]":
                answer.is_done = True
            elif line.startswith("data: "):
                answer.num_events += 1
                answer.take(json.loads(line.removeprefix("data: ")))
    return answer
