"""The cases of `baton conformance`: what an endpoint for OpenAI's clients must do.

Each takes an `Endpoint`, raises Fault at what is wrong, and returns what another endpoint with the
same model must say too: texts are greedy, or drawn with a seed. Ids and times are left out.
"""

import json
from collections.abc import Callable
from typing import Any

from deploy.conformance_api import Endpoint, Json, expect, joined, text_of

Case = Callable[[Endpoint], object]

CASES: dict[str, Case] = {}
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "size": {"type": "integer"}},
    "required": ["city", "size"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": SCHEMA}}


def case(name: str) -> Callable[[Case], Case]:
    def add(function: Case) -> Case:
        CASES[name] = function
        return function

    return add


def _choices(answer: Json, number: int = 1) -> list[Json]:
    choices = answer["choices"]
    expect(len(choices) == number, f"{len(choices)} choices instead of {number}")
    expect([c["index"] for c in choices] == list(range(number)), "choices out of order")
    reasons = {"stop", "length", "tool_calls"}
    expect(all(c["finish_reason"] in reasons for c in choices), "a choice without its end")
    return list(choices)


def _same_streamed(ask: Callable[..., Any], number: int = 1, **fields: Any) -> object:
    """A stream says what the whole answer does, byte for byte, with one end for each choice."""
    choices = _choices(ask(**fields).ok(), number)
    told = joined(ask(stream=True, **fields).chunks())
    whole = {c["index"]: (text_of(c), [c["finish_reason"]]) for c in choices}
    expect(told == whole, f"the stream says {told}, the whole answer {whole}")
    return whole


@case("models")
def models(api: Endpoint) -> object:
    listed = api.get("/v1/models").ok()
    expect(listed["object"] == "list", "no list")
    one = api.get(f"/v1/models/{api.model}").ok()
    expect(one in listed["data"], "a model that is not in the list")
    api.get("/v1/models/no-such-model").error(404)
    return one["id"]


@case("chat: whole = streamed")
def chat(api: Endpoint) -> object:
    return _same_streamed(api.chat)


@case("completion: whole = streamed")
def completion(api: Endpoint) -> object:
    return _same_streamed(api.complete)


@case("unicode: whole = streamed")
def unicode(api: Endpoint) -> object:
    return _same_streamed(api.complete, prompt="한국어 🌍👩‍👩‍👧 é", max_tokens=16)


@case("token ids as a prompt")
def token_ids(api: Endpoint) -> object:
    return _same_streamed(api.complete, prompt=[5, 6, 7, 8])


@case("several prompts")
def prompts(api: Endpoint) -> object:
    return _same_streamed(api.complete, 2, prompt=["One, two,", "A, B, C,"])


@case("n = 2, seeded")
def samples(api: Endpoint) -> object:
    return _same_streamed(api.chat, 2, n=2, temperature=1, seed=7)


@case("usage")
def usage(api: Endpoint) -> object:
    whole = api.chat(ignore_eos=True).ok()["usage"]
    expect(whole["completion_tokens"] == 12, f"{whole['completion_tokens']} tokens instead of 12")
    total = whole["prompt_tokens"] + whole["completion_tokens"]
    expect(whole["total_tokens"] == total, "usage does not add up")
    told = api.chat(ignore_eos=True, stream=True, stream_options={"include_usage": True}).chunks()
    expect(told[-1]["choices"] == [], "the chunk with the usage has choices")
    expect(told[-1]["usage"]["total_tokens"] == total, "a stream tells another usage")
    expect(all(not c.get("usage") for c in api.chat(stream=True).chunks()), "usage nobody wanted")
    return total


@case("max_tokens and its like")
def limits(api: Endpoint) -> object:
    for fields in ({"max_tokens": 1}, {"max_tokens": ..., "max_completion_tokens": 3}):
        (choice,) = _choices(api.chat(ignore_eos=True, **fields).ok())
        expect(choice["finish_reason"] == "length", "the end is not length")
    least = api.complete(min_tokens=8, max_tokens=8).ok()["usage"]["completion_tokens"]
    expect(least == 8, f"min_tokens 8 gave {least}")
    return least


@case("stop strings")
def stops(api: Endpoint) -> object:
    (free,) = _choices(api.complete(max_tokens=24, ignore_eos=True).ok())
    text = text_of(free)
    stop = text[len(text) // 2 : len(text) // 2 + 2]
    expect(stop, "nothing to stop at")
    told = _same_streamed(api.complete, max_tokens=24, ignore_eos=True, stop=[stop])
    assert isinstance(told, dict)
    said, reasons = told[0]
    expect(said == text[: text.index(stop)], f"stopped at {said!r}")
    expect(reasons == ["stop"], f"the end is {reasons}")
    return told


@case("logprobs")
def logprobs(api: Endpoint) -> object:
    (choice,) = _choices(api.chat(logprobs=True, top_logprobs=2).ok())
    content = choice["logprobs"]["content"]
    expect(all(len(entry["top_logprobs"]) == 2 for entry in content), "not 2 at each place")
    expect(all(entry["logprob"] <= 0 for entry in content), "a logprob above 0")
    (choice,) = _choices(api.complete(logprobs=2).ok())
    lists = choice["logprobs"]
    lengths = {len(lists[name]) for name in ("tokens", "token_logprobs", "text_offset")}
    expect(len(lengths) == 1, "lists of several lengths")
    return [entry["token"] for entry in content], lists["tokens"]


@case("echo")
def echo(api: Endpoint) -> object:
    (choice,) = _choices(api.complete(echo=True, logprobs=1).ok())
    expect(choice["text"].startswith("One, two, three,"), "the prompt is not there")
    expect(choice["logprobs"]["text_offset"][0] == 0, "offsets do not begin with the prompt")
    return choice["text"]


@case("seed")
def seed(api: Endpoint) -> object:
    texts = [text_of(_choices(api.chat(temperature=1, seed=11).ok())[0]) for _ in range(2)]
    expect(texts[0] == texts[1], "two answers to one seed")
    return texts


@case("logit_bias, penalties, top_k, min_p")
def sampling(api: Endpoint) -> object:
    said = api.complete(prompt=[5, 6], logit_bias={"10": 100}, logprobs=0, max_tokens=3).ok()
    tokens = said["choices"][0]["logprobs"]["tokens"]
    expect(len(set(tokens)) == 1, f"a bias of 100 gave {tokens}")
    fields: Json = {"presence_penalty": 1.5, "frequency_penalty": 0.5, "repetition_penalty": 1.1}
    return _same_streamed(api.chat, temperature=1, seed=3, top_k=9, min_p=0.01, top_p=0.9, **fields)


@case("response_format: json_schema")
def json_schema(api: Endpoint) -> object:
    named = {"name": "answer", "schema": SCHEMA, "strict": True}
    form = {"type": "json_schema", "json_schema": named}
    (choice,) = _choices(api.chat(response_format=form, max_tokens=96, stop=...).ok())
    if choice["finish_reason"] == "stop":
        expect(set(json.loads(text_of(choice))) == {"city", "size"}, "not what the schema says")
    return text_of(choice)


@case("choice, regex")
def forms(api: Endpoint) -> object:
    texts = []
    for form, allowed in (
        ({"choice": ["yes", "no"]}, ("yes", "no")),
        ({"regex": "[ab]{3}"}, tuple(a + b + c for a in "ab" for b in "ab" for c in "ab")),
    ):
        (choice,) = _choices(api.chat(structured_outputs=form).ok())
        expect(text_of(choice) in allowed, f"{text_of(choice)!r} is not within {form}")
        texts.append(text_of(choice))
    return texts


@case("tools")
def tools(api: Endpoint) -> object:
    asked: Json = {"tools": [TOOL], "tool_choice": "required", "max_tokens": 128}
    (choice,) = _choices(api.chat(**asked).ok())
    calls = choice["message"].get("tool_calls") or []
    expect(calls, "no call, though one is required")
    expect(calls[0]["function"]["name"] == "look_up", "a call of another tool")
    arguments = calls[0]["function"]["arguments"]
    if choice["finish_reason"] == "tool_calls":
        expect(set(json.loads(arguments)) == {"city", "size"}, "arguments unlike the schema")
    deltas = [
        call["function"].get("arguments") or ""
        for chunk in api.chat(stream=True, **asked).chunks()
        for part in chunk["choices"]
        for call in part["delta"].get("tool_calls") or []
        if call["index"] == 0
    ]
    expect("".join(deltas) == arguments, "a stream tells other arguments")
    _choices(api.chat(tools=[TOOL], tool_choice="none").ok())
    return arguments


@case("tokenize = detokenize")
def tokens(api: Endpoint) -> object:
    text = "Größe 🌍, two"
    body = {"model": api.model, "prompt": text, "add_special_tokens": False}
    told = api.send("POST", "/tokenize", json=body).ok()
    expect(told["count"] == len(told["tokens"]), "a wrong count")
    body = {"model": api.model, "tokens": told["tokens"]}
    back = api.send("POST", "/detokenize", json=body).ok()["prompt"]
    expect(back == text, f"{text!r} comes back as {back!r}")
    return told["tokens"]


@case("health, version, metrics, document")
def operations(api: Endpoint) -> object:
    for path in ("/healthz", "/readyz", "/version", "/openapi.json"):
        api.get(path).ok()
    metrics = api.get("/metrics")
    expect("baton_requests_total" in metrics.text, "no metrics")
    return None
