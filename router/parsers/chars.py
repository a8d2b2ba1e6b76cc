"""Parsers that are fed a text in pieces, wherever it is cut.

A parser is a coroutine over characters: it gets one at a time, "" at the end, and tells events as
soon as they are certain. So a text means the same in any pieces. What may yet turn out to be no
call is held (`_held`), and given as text if it is none. A parser takes each character once, or a
bounded number of times: no text makes it slow.

Its methods take the character where they begin and return the one behind what they took.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from contextlib import suppress
from typing import TypeVar

from pydantic_core import from_json

from router.parsers.events import CallArguments, CallBegin, Event, Text, merged

T = TypeVar("T")
Chars = Generator[None, str, T]

SPACE = frozenset(" \t\r\n")
NO_ARGUMENTS = "{}"
_OF_STRINGS = re.compile(r'[^"\\]+')


class NotACall(Exception):
    """What is held is text."""


class CharParser(ABC):
    def __init__(self) -> None:
        self._events: list[Event] = []
        self._held: list[str] = []
        self._plain: re.Pattern[str] | None = None
        self._take_plain: Callable[[str], None] = self._refuse
        self._machine = self._run()
        next(self._machine)

    def push(self, text: str) -> list[Event]:
        position = 0
        while position < len(text):
            if self._plain is not None and (run := self._plain.match(text, position)):
                self._take_plain(run[0])
                position = run.end()
            else:
                self._machine.send(text[position])
                position += 1
        return self._take()

    def finish(self) -> list[Event]:
        """The text is over; nothing is pushed any more."""
        with suppress(StopIteration):
            self._machine.send("")
            raise AssertionError("a parser goes on behind the end")
        return self._take()

    @abstractmethod
    def _run(self) -> Chars[None]:
        """Returns at the end of the text."""

    def _take(self) -> list[Event]:
        events, self._events = self._events, []
        return merged(events)

    def _skim(self, plain: re.Pattern[str], take: Callable[[str], None]) -> Chars[str]:
        """The next character, behind runs of `plain` ones, which `take` gets at once: by far the
        most of a text."""
        self._plain, self._take_plain = plain, take
        char = yield
        self._plain = None
        return char

    def _refuse(self, text: str) -> None:
        raise AssertionError("nobody skims")

    def _next(self) -> Chars[str]:
        """The next character, held."""
        char = yield
        self._held.append(char)
        return char

    def _given_up(self) -> tuple[str, str]:
        """(what was held before the last character, that character)."""
        *held, last = self._held
        self._held = []
        return "".join(held), last

    def _literal(self, text: str, char: str) -> Chars[str]:
        """Raises NotACall. The first character of `text` comes in it only once, so that a text that
        breaks off within it can begin anew only where it broke off."""
        for wanted in text:
            if char != wanted:
                raise NotACall
            char = yield from self._next()
        return char

    def _space(self, char: str) -> Chars[str]:
        while char and char in SPACE:
            char = yield from self._next()
        return char

    def _string(self, char: str, limit: int | None = None) -> Chars[tuple[str, str]]:
        """A JSON string of at most `limit` characters, decoded. Raises NotACall."""
        if char != '"':
            raise NotACall
        raw, is_escaped = char, False
        while True:
            char = yield from self._next()
            if not char or (limit is not None and len(raw) > limit):
                raise NotACall
            raw += char
            if char == '"' and not is_escaped:
                break
            is_escaped = char == "\\" and not is_escaped
        try:
            value = from_json(raw)
        except ValueError as error:
            raise NotACall from error
        char = yield from self._next()
        return value, char


class ToolParser(CharParser):
    """Text between calls is kept. White space is not, where only calls, the beginning or the end
    stand on both of its sides."""

    def __init__(self) -> None:
        super().__init__()
        self._num_calls = 0
        self.is_cut = False
        """The arguments of the last call have not ended."""
        self._gap: str | None = ""
        """White space behind a call, or at the beginning; None: there is text before it."""

    def _text(self, text: str, gaps: frozenset[str] = SPACE) -> None:
        if self._gap is not None:
            self._gap += text
            if gaps.issuperset(text):
                return
            text, self._gap = self._gap, None
        if text:
            self._events.append(Text(text))

    def _end_of_text(self) -> None:
        if self._gap and not self._num_calls:
            self._events.append(Text(self._gap))

    def _begin(self, name: str) -> None:
        """It is a call, whatever comes: nothing is held any more."""
        self._events.append(CallBegin(name))
        self._held, self._gap, self.is_cut = [], "", True
        self._num_calls += 1

    def _argue(self, text: str) -> None:
        self._events.append(CallArguments(text))

    def _object(self, char: str) -> Chars[str]:
        """`{"name": …, "arguments": …}` with its keys in any order. Raises NotACall before the call
        begins. What is wrong behind the arguments' beginning is passed over."""
        name: str | None = None
        arguments = NO_ARGUMENTS
        char = yield from self._literal("{", char)
        char = yield from self._space(char)
        while char != "}":
            key, char = yield from self._string(char)
            char = yield from self._colon(char)
            if key == "name":
                name, char = yield from self._string(char)
            elif key in ("arguments", "parameters"):
                if name is not None:
                    self._begin(name)
                    char = yield from self._arguments(char)
                    return (yield from self._rest_of_object(char))
                arguments, char = yield from self._value(char)
            else:
                _, char = yield from self._value(char)
            char = yield from self._space(char)
            if char == ",":
                char = yield from self._next()
                char = yield from self._space(char)
            elif char != "}":
                raise NotACall
        if name is None:
            raise NotACall
        self._begin(name)
        self._argue(_as_object(arguments))
        self.is_cut = False
        char = yield
        return char

    def _colon(self, char: str) -> Chars[str]:
        char = yield from self._space(char)
        char = yield from self._literal(":", char)
        return (yield from self._space(char))

    def _value(self, char: str) -> Chars[tuple[str, str]]:
        """Any JSON value, as it stands. Raises NotACall at the end of the text."""
        raw, balance = "", Balance()
        while not balance.is_behind(char):
            if not char:
                raise NotACall
            raw += char
            char = yield from self._next()
        return raw.strip(), char

    def _arguments(self, char: str) -> Chars[str]:
        """Tells them as they come, if they are an object. Some models write it into a string."""
        balance = Balance()
        if char != "{":
            raw, char = yield from self._rest_of_value(char, balance)
            self._argue(_as_object(raw))
        else:
            while char and not balance.is_behind(char):
                self._argue(char)
                if balance.is_in_string:
                    char = yield from self._skim(_OF_STRINGS, self._argue)
                else:
                    char = yield
        self.is_cut = not char and not balance.is_over
        return char

    def _rest_of_value(self, char: str, balance: "Balance") -> Chars[tuple[str, str]]:
        raw = ""
        while char and not balance.is_behind(char):
            raw += char
            char = yield
        return raw.strip(), char

    def _rest_of_object(self, char: str) -> Chars[str]:
        """Behind the `}` of the object whose value ended before `char`."""
        while char and char != "}":
            if char in ",:]":
                char = yield
            else:
                _, char = yield from self._rest_of_value(char, Balance())
        if char:
            char = yield
        return char


class Balance:
    """Where a JSON value ends: brackets are counted, outside of strings."""

    def __init__(self) -> None:
        self._depth = 0
        self._is_string = self._is_escaped = self.is_over = False

    @property
    def is_in_string(self) -> bool:
        """Nothing but a quote or a backslash counts next."""
        return self._is_string and not self._is_escaped

    def is_behind(self, char: str) -> bool:
        """The value has ended before `char`."""
        if self.is_over:
            return True
        if self._is_string:
            self._is_string = char != '"' or self._is_escaped
            self._is_escaped = char == "\\" and not self._is_escaped
            self.is_over = not self._is_string and self._depth == 0
            return False
        if char == '"':
            self._is_string = True
        elif char in ("{", "["):
            self._depth += 1
        elif char in ("}", "]"):
            if self._depth == 0:
                return True
            self._depth -= 1
            self.is_over = self._depth == 0
        elif char == ",":
            return self._depth == 0
        return False


def _as_object(raw: str) -> str:
    """Arguments that did not come as an object: none, or one in a string; else as they stand."""
    try:
        value = from_json(raw)
        if isinstance(value, str) and isinstance(from_json(value), dict):
            return value
    except ValueError:
        return raw
    return NO_ARGUMENTS if value is None or value == "" else raw
