"""One POST over a made-up connection: what only a bad client does."""

import asyncio
import json

import pytest
from prometheus_client import CollectorRegistry
from starlette.types import Message, Scope

from router.errors import ApiError
from router.exchange import Answer, Exchange, Reply
from router.metrics import RouterMetrics
from router.record import RequestRecord
from router.request import RequestId
from router.sse import event
from router.tokenizer import JSONObject
from router.workers import WorkerSet

SCOPE: Scope = {"type": "http", "headers": []}


class Connection:
    """A client that takes `capacity` messages, and leaves when told to."""

    def __init__(self, capacity: int = 1000) -> None:
        self.sent: list[Message] = []
        self.left = asyncio.Event()
        self._capacity = capacity
        self._has_sent_body = False

    async def receive(self) -> Message:
        if not self._has_sent_body:
            self._has_sent_body = True
            return {"type": "http.request", "body": b"{}", "more_body": False}
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        if len(self.sent) == self._capacity:
            await asyncio.Event().wait()
        self.sent.append(message)


class Counted:
    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        workers = WorkerSet((), (), interval_s=1.0, timeout_s=1.0)
        self._metrics = RouterMetrics(self._registry, workers)
        self.record = RequestRecord(RequestId("r"), "/v1/completions", is_kept=True)

    def exchange(self, answer: Answer) -> Exchange:
        return Exchange(
            answer,
            self._metrics,
            self.record,
            max_body_nbytes=10,
            body_timeout_s=1.0,
            send_timeout_s=0.05,
        )

    def outcome(self, name: str) -> float | None:
        return self._registry.get_sample_value("baton_requests_total", {"outcome": name})


async def test_a_client_that_takes_nothing_any_more_is_left() -> None:
    ended = asyncio.Event()

    async def answer(body: JSONObject, reply: Reply) -> None:
        try:
            while True:
                await reply.events(event("more"))
        finally:
            ended.set()

    counted, connection = Counted(), Connection(capacity=3)
    await counted.exchange(answer)(SCOPE, connection.receive, connection.send)
    assert ended.is_set()
    assert counted.outcome("cancelled") == 1


async def test_an_event_is_one_line_to_every_client() -> None:
    """httpx, for one, takes every line break that Unicode knows for the end of a line."""
    text = "\r\n\v\f\x1c\x1d\x1e\x85\u2028\u2029🌍"

    async def answer(body: JSONObject, reply: Reply) -> None:
        await reply.events(event(json.dumps({"text": text}, ensure_ascii=False)))
        reply.last_event("[DONE]")

    counted, connection = Counted(), Connection()
    await counted.exchange(answer)(SCOPE, connection.receive, connection.send)
    line = connection.sent[1]["body"].decode().removesuffix("\n\n")
    assert line.splitlines() == [line]
    assert json.loads(line.removeprefix("data: ")) == {"text": text}


async def test_the_last_byte_is_not_sent_before_the_request_is_counted() -> None:
    async def answer(body: JSONObject, reply: Reply) -> None:
        reply.json("{}")
        assert connection.sent == []

    counted, connection = Counted(), Connection()
    await counted.exchange(answer)(SCOPE, connection.receive, connection.send)
    assert connection.sent[-1]["body"] == b"{}"
    assert counted.outcome("completed") == 1


async def test_work_is_awaited_when_the_client_leaves() -> None:
    steps: list[str] = []

    async def answer(body: JSONObject, reply: Reply) -> None:
        try:
            connection.left.set()
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            steps.append("cleaned up")

    counted, connection = Counted(), Connection()
    await counted.exchange(answer)(SCOPE, connection.receive, connection.send)
    assert steps == ["cleaned up"]
    assert counted.outcome("cancelled") == 1


async def test_being_cancelled_is_not_swallowed() -> None:
    async def answer(body: JSONObject, reply: Reply) -> None:
        await asyncio.Event().wait()

    counted, connection = Counted(), Connection()
    serving = asyncio.create_task(
        counted.exchange(answer)(SCOPE, connection.receive, connection.send)
    )
    await asyncio.sleep(0.01)
    serving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await serving
    assert counted.outcome("cancelled") == 1


async def test_a_bug_after_the_first_event_is_told() -> None:
    async def answer(body: JSONObject, reply: Reply) -> None:
        await reply.events(event("more"))
        raise ZeroDivisionError

    counted, connection = Counted(), Connection()
    await counted.exchange(answer)(SCOPE, connection.receive, connection.send)
    assert b"Internal error." in connection.sent[-1]["body"]
    assert not connection.sent[-1]["more_body"]
    assert counted.outcome("failed") == 1


async def test_an_error_before_the_first_byte_is_for_the_app() -> None:
    async def answer(body: JSONObject, reply: Reply) -> None:
        raise ApiError(418, "short and stout")

    counted, connection = Counted(), Connection()
    with pytest.raises(ApiError):
        await counted.exchange(answer)(SCOPE, connection.receive, connection.send)
    assert connection.sent == []
