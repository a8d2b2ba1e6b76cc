"""`baton chat`: a conversation with a running cluster, streamed into the terminal.

Without words it asks for lines until Ctrl-D; with words, or a question on stdin, it answers that
one and ends. Ctrl-C in the middle of an answer ends the answer, and what had come of it is kept;
Ctrl-C at the prompt ends the program. `/why` shows where the time of the last answer went.
"""

import json
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from typing import Any

import httpx
from rich.console import Console

from deploy import target
from deploy.target import NoRouter, ask, refusal, why

HELP = """\
/new          forget what was said
/system TEXT  an instruction that stands before what is said; without TEXT there is none
/why          where the time of the last answer went
/help         this
Ctrl-C ends an answer, Ctrl-D the program."""

BAR_CELLS = 30
"""Of `/why`, for the whole time."""

SILENCE_S = 120.0
"""A router that sends nothing for so long is given up."""


class Chat:
    """What was said so far, and the router that answers."""

    def __init__(self, http: httpx.Client, console: Console, options: Namespace) -> None:
        self._http = http
        self._console = console
        self._model = options.model or str(ask(http, "/v1/models")["data"][0]["id"])
        self._sampling = {
            name: value
            for name in ("temperature", "top_p", "max_tokens", "seed")
            if (value := getattr(options, name)) is not None
        }
        self._system: str = options.system
        self._said: list[dict[str, str]] = []
        self._request_id = ""

    def say(self, text: str) -> None:
        """Prints the answer as it comes. Raises NoRouter."""
        self._said.append({"role": "user", "content": text})
        answer = ""
        try:
            for piece in self._stream():
                answer += piece
                self._console.out(piece, end="", highlight=False)
        except KeyboardInterrupt:
            self._console.out(" […]", end="")
        finally:
            self._console.out()
            if answer:
                self._said.append({"role": "assistant", "content": answer})
            else:
                self._said.pop()

    def command(self, line: str) -> None:
        """Raises NoRouter."""
        word, _, rest = line.partition(" ")
        if word == "/new":
            self._said.clear()
        elif word == "/system":
            self._system = rest.strip()
        elif word == "/why":
            self._explain()
        else:
            self._console.out(HELP if word == "/help" else f"no such command: {word}\n{HELP}")

    def _stream(self) -> Iterator[str]:
        system = [{"role": "system", "content": self._system}] if self._system else []
        messages = [*system, *self._said]
        body = {"model": self._model, "messages": messages, "stream": True, **self._sampling}
        path = "/v1/chat/completions"
        try:
            with self._http.stream("POST", path, json=body, timeout=SILENCE_S) as response:
                self._request_id = response.headers.get("x-baton-request-id", "")
                if response.is_error:
                    told = json.loads(response.read())
                    raise NoRouter(refusal(told) or f"the answer is {response.status_code}")
                yield from _pieces(response.iter_lines())
        except (httpx.HTTPError, ValueError) as error:
            raise NoRouter(why(self._http, error)) from error

    def _explain(self) -> None:
        if not self._request_id:
            self._console.out("Nothing was asked yet.")
            return
        told = ask(self._http, f"/v1/requests/{self._request_id}")
        for line in explained(told):
            self._console.out(line)


def _pieces(lines: Iterator[str]) -> Iterator[str]:
    """Of an answer as server-sent events. Raises NoRouter where it ends with an error."""
    for line in lines:
        data = line.removeprefix("data: ")
        if data == line or data == "[DONE]":
            continue
        event: dict[str, Any] = json.loads(data)
        if message := refusal(event):
            raise NoRouter(message)
        for choice in event["choices"]:
            if text := choice["delta"].get("content"):
                yield text


def explained(told: dict[str, Any]) -> list[str]:
    """Lines of what `GET /v1/requests/ID` says: who computed it, and a bar for each part of the
    time to the first byte."""
    pair = told["pair"]
    lines = [f"request {told['id']}: prefill on {pair['prefill'] or pair['decode']}, "
             f"decode on {pair['decode']}"]  # fmt: skip
    parts: dict[str, float] = dict(told["parts_ms"])
    if told["residual_ms"] is not None:
        parts["all else"] = told["residual_ms"]
    total = sum(parts.values())
    for name, ms in parts.items():
        bar = "█" * round(BAR_CELLS * ms / total) if total > 0 else ""
        lines.append(f"  {name:18} {ms:9.1f} ms {bar}".rstrip())
    if told["total_ms"] is not None:
        lines.append(f"  {'first byte after':18} {told['total_ms']:9.1f} ms")
    return lines


def main(argv: Sequence[str]) -> int:
    options = _options(argv)
    console = Console(highlight=False, markup=False, soft_wrap=True)
    try:
        with target.client_of(options) as http:
            chat = Chat(http, console, options)
            question = " ".join(options.words) or ("" if sys.stdin.isatty() else sys.stdin.read())
            if question.strip():
                chat.say(question)
            elif sys.stdin.isatty():
                _converse(chat, console)
    except NoRouter as error:
        print(f"baton: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        console.out()
    return 0


def _converse(chat: Chat, console: Console) -> None:
    console.out("/help tells what else there is.")
    while True:
        try:
            line = input("> ").strip()
        except EOFError:
            console.out()
            return
        try:
            if line.startswith("/"):
                chat.command(line)
            elif line:
                chat.say(line)
        except NoRouter as error:
            print(f"baton: {error}", file=sys.stderr)


def _options(argv: Sequence[str]) -> Namespace:
    parser = target.parser_of("chat", __doc__)
    parser.add_argument("words", nargs="*", metavar="WORD", help="one question; none: converse")
    parser.add_argument("--model", default="", help="its name; else the one that is served")
    parser.add_argument("--system", default="", metavar="TEXT", help="an instruction before all")
    parser.add_argument("--temperature", type=float, metavar="X")
    parser.add_argument("--top-p", type=float, metavar="X")
    parser.add_argument("--max-tokens", type=int, metavar="N")
    parser.add_argument("--seed", type=int, metavar="N")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
