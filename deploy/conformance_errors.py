"""Cases of `baton conformance` for what is refused: OpenAI's error object, and the right status."""

from typing import Any

from deploy.conformance_api import Endpoint, expect
from deploy.conformance_cases import case

REFUSED: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 9},
    "no_such_parameter": {"no_such_parameter": 1},
    "n": {"n": 0},
    "suffix": {"suffix": "x"},
    "max_tokens": {"max_tokens": -1},
    "stream_options": {"stream_options": {"include_usage": True}},
    "guided_regex": {"guided_regex": "(a{1000}){1000}"},
    "response_format": {"response_format": {"type": "no_such"}},
    "prompt": {"prompt": []},
}


@case("refused by name")
def refused(api: Endpoint) -> object:
    codes = []
    for param, fields in REFUSED.items():
        error = api.complete(**fields).error(400)
        told = str(error["param"])
        expect(told.split(".")[0] == param, f"{param} is refused as {told}")
        codes.append(error["code"])
    return codes


@case("no path, wrong method")
def paths(api: Endpoint) -> object:
    api.get("/v1/no/such/path").error(404)
    answer = api.get("/v1/chat/completions")
    answer.error(405)
    expect(answer.headers.get("allow") == "POST", "405 without Allow")
    return None


@case("bodies that are none")
def bodies(api: Endpoint) -> object:
    headers = {"content-type": "application/json"}
    for content in (b"{", b"[]", b"\xff", b"", b"[" * 10_000):
        api.send("POST", "/v1/completions", content=content, headers=headers).error(400)
    headers = {"content-type": "text/plain"}
    api.send("POST", "/v1/completions", content=b"{}", headers=headers).error(415)
    return None


@case("no such model")
def no_model(api: Endpoint) -> object:
    return api.complete(model="no-such-model").error(404)["code"]


@case("a prompt that is too long")
def too_long(api: Endpoint) -> object:
    error = api.complete(prompt=[5] * 400_000).error(400)
    expect("400000" in error["message"], "the numbers are not told")
    return error["code"]
