"""`baton conformance` finds what is wrong: here with workers that say the same to everything."""

import json

import httpx
import pytest

from deploy import cli, conformance
from deploy.conformance_api import Answer, Endpoint, Fault, joined
from deploy.conformance_cases import CASES
from tests.deploy import terminal
from tests.router.model_folder import write_model_folder
from tests.router.served_fakes import served_fakes

OBEY_NOTHING = {
    "usage",  # `ignore_eos` is not obeyed
    "logit_bias, penalties, top_k, min_p",
    "response_format: json_schema",
    "choice, regex",
    "tools",
}
URL = "http://server.test"


def test_what_is_wrong_is_told(
    tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    """And what is not, is not: the router in front of them is sound."""
    with served_fakes(write_model_folder(tmp_path_factory.mktemp("model"))) as url:
        with Endpoint(url) as endpoint:
            rows = conformance.run(CASES, [endpoint, endpoint], compare=True)
        assert {row.name for row in rows if not row.is_sound} == OBEY_NOTHING
        with pytest.raises(SystemExit) as end:
            cli.main(["conformance", "--url", url, "--model", "tiny"])
        narrow = {"TERM": "dumb", "COLUMNS": "60", "LINES": "40"}  # dumb ones do not tell theirs
        shown, status = terminal.run("conformance", "--url", url, columns=60, **narrow)
    assert end.value.code == status == 1
    assert "\x1b" not in shown
    assert all(len(line) <= 60 for line in shown.splitlines()), shown
    assert shown.endswith(f"{len(CASES) - len(OBEY_NOTHING)} of {len(CASES)} cases are sound\n")
    told = capsys.readouterr().out
    assert all(name in told for name in CASES)
    assert f"{len(CASES) - len(OBEY_NOTHING)} of {len(CASES)} cases are sound" in told


def endpoint_saying(text: str, status: int = 200) -> Endpoint:
    transport = httpx.MockTransport(lambda request: httpx.Response(status, text=text))
    return Endpoint(URL, "m", transport=transport)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"choices": [{}]}', "<html>"])
def test_an_endpoint_that_makes_no_sense(text: str) -> None:
    """Every case has a fault, and none breaks the command."""
    for status in (200, 500):
        with endpoint_saying(text, status) as endpoint:
            rows = conformance.run(CASES, [endpoint], compare=False)
        assert not [row.name for row in rows if row.is_sound]


def test_two_that_differ() -> None:
    with endpoint_saying("{}") as one, endpoint_saying("{}") as other:
        said = iter(["a", "b"])
        (row,) = conformance.run({"x": lambda api: next(said)}, [one, other], compare=True)
        assert row.difference == "a / b"
        said = iter(["a", "b"])
        (row,) = conformance.run({"x": lambda api: next(said)}, [one, other], compare=False)
        assert row.is_sound


def test_a_stream_without_its_end() -> None:
    chunk = json.dumps({"choices": [{"index": 0, "text": "a", "finish_reason": "stop"}]})
    kind = {"content-type": "text/event-stream"}
    whole = Answer(200, kind, f"data: {chunk}\n\ndata: [DONE]\n\n")
    assert joined(whole.chunks()) == {0: ("a", ["stop"])}
    for text in (f"data: {chunk}\n\n", f"{chunk}\n\ndata: [DONE]\n\n", ""):
        with pytest.raises(Fault):
            Answer(200, kind, text).chunks()
    assert joined([*whole.chunks(), *whole.chunks()]) == {0: ("aa", ["stop", "stop"])}


def test_nobody_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert conformance.main(["--url", "http://127.0.0.1:1"]) == 2
    assert "lists no model" in capsys.readouterr().err
