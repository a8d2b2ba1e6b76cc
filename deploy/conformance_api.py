"""What `baton conformance` needs of HTTP: an endpoint, its answers, and the words for a fault."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import httpx

Json = dict[str, Any]


class Fault(Exception):
    """The endpoint does not do what it should; the text is for people."""


def expect(condition: object, text: str) -> None:
    """Raises Fault."""
    if not condition:
        raise Fault(text)


@dataclass(frozen=True)
class Answer:
    status: int
    headers: Mapping[str, str]
    text: str

    def json(self) -> Json:
        try:
            document = json.loads(self.text)
        except ValueError as error:
            raise Fault(f"not JSON: {self.text[:80]!r}") from error
        expect(isinstance(document, dict), "not a JSON object")
        return dict(document)

    def ok(self) -> Json:
        expect(self.status == 200, f"status {self.status}: {self.text[:160]}")
        return self.json()

    def error(self, status: int) -> Json:
        """The error object, whose message and code are all that two endpoints must share."""
        expect(self.status == status, f"status {self.status} instead of {status}")
        error = self.json().get("error")
        expect(isinstance(error, dict), "no error object")
        assert isinstance(error, dict)
        missing = {"message", "type", "param", "code"} - set(error)
        expect(not missing, f"the error object lacks {', '.join(sorted(missing))}")
        return error

    def chunks(self) -> list[Json]:
        """Of a stream, each within its event, and [DONE] behind them."""
        expect(self.status == 200, f"status {self.status}: {self.text[:160]}")
        kind = self.headers.get("content-type", "")
        expect(kind.startswith("text/event-stream"), f"content-type is {kind!r}")
        events = [event for event in self.text.split("\n\n") if event]
        expect(all(event.startswith("data: ") for event in events), "an event without data")
        *data, done = [event.removeprefix("data: ") for event in events] or [""]
        expect(done == "[DONE]", "no [DONE] at the end")
        return [json.loads(chunk) for chunk in data]


class Endpoint:
    """One server under test."""

    def __init__(
        self,
        url: str,
        model: str = "",
        *,
        api_key: str = "none",
        timeout_s: float = 60.0,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        """Without a model, it is the first that the server lists. Raises Fault."""
        self._http = httpx.Client(
            base_url=url.rstrip("/").removesuffix("/v1"),
            headers={"Authorization": f"Bearer {api_key}"},
            timeout=timeout_s,
            trust_env=False,
            transport=transport,
        )
        try:
            self.model = model or str(self.get("/v1/models").ok()["data"][0]["id"])
        except (Fault, LookupError, TypeError) as error:
            self._http.close()
            raise Fault(f"{url} lists no model: {error}") from error

    def __enter__(self) -> "Endpoint":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._http.close()

    def get(self, path: str) -> Answer:
        return self.send("GET", path)

    def send(self, method: str, path: str, **how: Any) -> Answer:
        """Raises Fault if no answer comes."""
        try:
            response = self._http.request(method, path, **how)
        except httpx.HTTPError as error:
            raise Fault(str(error) or type(error).__name__) from error
        return Answer(response.status_code, response.headers, response.text)

    def chat(self, text: str = "What is the capital of France?", **fields: Any) -> Answer:
        messages = [{"role": "user", "content": text}]
        return self._ask("/v1/chat/completions", {"messages": messages, **fields})

    def complete(self, prompt: object = "One, two, three,", **fields: Any) -> Answer:
        return self._ask("/v1/completions", {"prompt": prompt, **fields})

    def _ask(self, path: str, fields: Json) -> Answer:
        body = {"model": self.model, "temperature": 0, "max_tokens": 12, **fields}
        return self.send("POST", path, json={k: v for k, v in body.items() if v is not ...})


def text_of(choice: Json) -> str:
    """Of a whole answer's choice, chat or text."""
    return str(choice["message"]["content"] or "") if "message" in choice else str(choice["text"])


def joined(chunks: list[Json]) -> dict[int, tuple[str, list[str]]]:
    """Of each choice of a stream: its text, and all finish reasons that it was told."""
    told: dict[int, tuple[str, list[str]]] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            text, reasons = told.get(choice["index"], ("", []))
            piece = choice["delta"].get("content") if "delta" in choice else choice["text"]
            reason = choice["finish_reason"]
            told[choice["index"]] = (
                text + (piece or ""),
                [*reasons, reason] if reason else reasons,
            )
    return told
