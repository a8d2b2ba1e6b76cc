"""One event, one line, whoever says it."""

import asyncio
import contextvars
import json
import logging
from collections.abc import Iterator

import pytest

from runtime import log


@pytest.fixture(autouse=True)
def restore_logging() -> Iterator[None]:
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = before, level


def test_text_lines(capsys: pytest.CaptureFixture[str]) -> None:
    log.configure("decode-0")
    with log.bind_request("r1"):
        log.get_logger().info("attached", tokens=3)
    log.get_logger().debug("not said")
    logging.getLogger("a.library").warning("from %s", "below")
    first, second = capsys.readouterr().err.splitlines()
    assert "level=info process=decode-0 event=attached" in first
    assert "request_id=r1" in first
    assert "tokens=3" in first
    assert 'event="from below"' in second
    assert "request_id" not in second


def test_json_keeps_a_traceback_within_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    log.configure("router", format="json")
    try:
        raise ValueError("two\nlines")
    except ValueError:
        log.get_logger().exception("failed")
    (line,) = capsys.readouterr().err.splitlines()
    event = json.loads(line)
    assert event["process"] == "router"
    assert "ValueError: two\nlines" in event["exception"]


def test_text_keeps_a_traceback_within_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    log.configure("router")
    log.get_logger().error("failed", exc_info=ValueError("two\nlines"))
    (line,) = capsys.readouterr().err.splitlines()
    assert "ValueError" in line


@pytest.mark.parametrize(
    ("error", "outcome"),
    [(None, "done"), (asyncio.CancelledError(), "cancelled"), (ValueError("x"), "ValueError")],
)
def test_a_leg_says_how_it_ended(
    error: BaseException | None, outcome: str, capsys: pytest.CaptureFixture[str]
) -> None:
    log.configure("prefill-0", format="json")

    def run() -> None:
        try:
            with log.leg("prefill", "r1", prompt_tokens=7):
                if error is not None:
                    raise error
        except BaseException:  # noqa: BLE001 (also the cancellation)
            log.get_logger().error("handler failed")

    contextvars.copy_context().run(run)
    log.get_logger().info("another request's")
    first, *failed, other = map(json.loads, capsys.readouterr().err.splitlines())
    assert (first["event"], first["outcome"], first["prompt_tokens"]) == (
        "prefill ended",
        outcome,
        7,
    )
    assert [line["request_id"] for line in (first, *failed)] == ["r1"] * (1 + (error is not None))
    assert "request_id" not in other
