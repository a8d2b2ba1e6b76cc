"""Bodies: what is taken, what is refused, and by which name."""

import math

import pytest

from router.errors import BadRequest
from router.schemas import ChatBody, CompletionBody
from router.tokenizer import JSONObject

CHAT: JSONObject = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
COMPLETION: JSONObject = {"model": "m", "prompt": "Hi"}


def test_defaults_are_openais() -> None:
    body = ChatBody.parse(CHAT)
    assert (body.temperature, body.top_p, body.stream, body.max_tokens) == (1.0, 1.0, False, None)


@pytest.mark.parametrize(
    "harmless",
    [
        {"n": 1},
        {"tools": [], "tool_choice": "auto"},
        {"logprobs": False, "top_logprobs": None},
        {"presence_penalty": 0.0, "frequency_penalty": 0},
        {"response_format": {"type": "text"}},
        {"temperature": None, "stop": None, "stream": None},
        {"user": "me", "metadata": {"a": "b"}, "store": False},
    ],
)
def test_what_asks_for_nothing_is_taken(harmless: JSONObject) -> None:
    ChatBody.parse({**CHAT, **harmless})


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"n": 17}, "n"),
        ({"n": 0}, "n"),
        ({"n": True}, "n"),
        ({"best_of": 2}, "best_of"),
        ({"tools": [{"type": "function"}]}, "tools.0.function"),
        ({"logprobs": 1}, "logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_object", "x": 1}}, "response_format.x"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}},
            "response_format.json_schema.schema",
        ),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
        ({"structured_outputs": {"regex": 1}}, "structured_outputs.regex"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"guided_choice": ["a", 1]}, "guided_choice.1"),
        ({"guided_decoding_backend": "outlines"}, "guided_decoding_backend"),
        ({"frobnicate": 1}, "frobnicate"),
        ({"frobnicate": None}, "frobnicate"),
        ({"temperature": "0.7"}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"seed": 1 << 64}, "seed"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
        ({"messages": []}, "messages"),
        ({"messages": "Hi"}, "messages"),
        ({"messages": [{"role": "function", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user"}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": "x", "audio": {}}]}, "messages.0.audio"),
        ({"messages": [{"role": "user", "content": None}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": [{"type": "x"}]}]}, "messages.0.content"),
        ({"a.b": 1}, "a.b"),
        ({"model": None}, "model"),
        ({"prompt": "Hi"}, "prompt"),
        ({"stop_token_ids": [-1]}, "stop_token_ids.0"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"min_p": 1.1}, "min_p"),
        ({"min_p": -0.1}, "min_p"),
        ({"presence_penalty": 2.1}, "presence_penalty"),
        ({"presence_penalty": "1"}, "presence_penalty"),
        ({"frequency_penalty": -2.1}, "frequency_penalty"),
        ({"frequency_penalty": math.nan}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"repetition_penalty": math.inf}, "repetition_penalty"),
        ({"logit_bias": {"5": 100.5}}, "logit_bias.5"),
        ({"logit_bias": {"5": math.nan}}, "logit_bias.5"),
        ({"logit_bias": {"-5": 1}}, "logit_bias.-5"),
        ({"logit_bias": [5]}, "logit_bias"),
        ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids.0"),
        ({"bad_words": [""]}, "bad_words.0"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"prompt_logprobs": 0, "stream": True}, "prompt_logprobs"),
        ({"echo": True}, "echo"),
        ({"bad_words": "a"}, "bad_words"),
        ({"bad_words": ["a"] * 129}, "bad_words"),
        ({"bad_words": ["a" * 257]}, "bad_words.0"),
        ({"cache_salt": 1}, "cache_salt"),
        ({"cache_salt": "x" * 257}, "cache_salt"),
    ],
)
def test_a_refusal_names_the_parameter(change: JSONObject, param: str) -> None:
    with pytest.raises(BadRequest) as refusal:
        ChatBody.parse({**CHAT, **change})
    assert refusal.value.param == param
    assert param.split(".")[-1] in refusal.value.message


@pytest.mark.parametrize(
    "change", [{"best_of": 17}, {"best_of": 0}, {"best_of": True}, {"n": 17}, {"n": 1.5}]
)
def test_samples_are_bounded(change: JSONObject) -> None:
    with pytest.raises(BadRequest) as refusal:
        CompletionBody.parse({**COMPLETION, **change})
    assert refusal.value.param in change


@pytest.mark.parametrize("change", [{"n": 3, "best_of": 2}, {"n": 2, "best_of": 3, "stream": True}])
def test_best_of_is_no_less_than_n_and_not_streamed(change: JSONObject) -> None:
    body = CompletionBody.parse({**COMPLETION, **change})
    with pytest.raises(BadRequest) as refusal:
        body.num_samples  # noqa: B018
    assert refusal.value.param == "best_of"


@pytest.mark.parametrize("change", [{"n": 2, "best_of": 2, "stream": True}, {"n": 2}, {}])
def test_best_of_is_n_unless_said(change: JSONObject) -> None:
    body = CompletionBody.parse({**COMPLETION, **change})
    assert body.num_samples == body.n


@pytest.mark.parametrize("change", [{"suffix": "x"}, {"store": True}])
def test_what_completions_do_not_have(change: JSONObject) -> None:
    with pytest.raises(BadRequest) as refusal:
        CompletionBody.parse({**COMPLETION, **change})
    assert refusal.value.param in change
    assert refusal.value.code == "unsupported_parameter"


@pytest.mark.parametrize("logprobs", [-1, 6, True, "1", 1.5])
def test_logprobs_of_completions_are_few(logprobs: object) -> None:
    with pytest.raises(BadRequest) as refusal:
        CompletionBody.parse({**COMPLETION, "logprobs": logprobs})
    assert refusal.value.param == "logprobs"


def test_top_logprobs_need_logprobs() -> None:
    body = ChatBody.parse({**CHAT, "top_logprobs": 2})
    with pytest.raises(BadRequest) as refusal:
        body.num_logprobs  # noqa: B018
    assert refusal.value.param == "top_logprobs"


@pytest.mark.parametrize("prompt", ["a", ["a", "b"], [1, 2], [[1], [2, 3]]])
def test_the_four_forms_of_a_prompt(prompt: object) -> None:
    assert CompletionBody.parse({"model": "m", "prompt": prompt}).prompt == prompt


@pytest.mark.parametrize("prompt", [1, None, [1, "a"], [[1], "a"], [-1], [True], {"a": 1}])
def test_other_forms_are_refused(prompt: object) -> None:
    with pytest.raises(BadRequest) as refusal:
        CompletionBody.parse({"model": "m", "prompt": prompt})
    assert refusal.value.param == "prompt"


def test_parts_of_a_text_are_joined() -> None:
    parts = [{"type": "text", "text": "Hi "}, {"type": "text", "text": "there"}]
    body = ChatBody.parse({**CHAT, "messages": [{"role": "user", "content": parts}]})
    assert body.messages[0].text == "Hi there"
    parts[0]["type"] = "image_url"
    with pytest.raises(BadRequest, match="messages"):
        ChatBody.parse({**CHAT, "messages": [{"role": "user", "content": parts}]})
