"""Calls as Mistral models write them, the older and the newer ones.

[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Paris"}}, …]
[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}[TOOL_CALLS]…
"""

import re

from router.parsers.chars import Chars, NotACall, ToolParser

TAG = "[TOOL_CALLS]"
ARGS = "[ARGS]"
ID = "[CALL_ID]"
_PLAIN = re.compile(r"[^\[]+")
_NAME = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-.")


class MistralParser(ToolParser):
    def _run(self) -> Chars[None]:
        char = yield from self._skim(_PLAIN, self._text)
        while char:
            if char != TAG[0]:
                self._text(char)
                char = yield from self._skim(_PLAIN, self._text)
                continue
            self._held = [char]
            try:
                char = yield from self._literal(TAG, char)
                char = yield from self._space(char)
                if char == "[":
                    char = yield from self._list(char)
                elif char == "{":
                    char = yield from self._object(char)
                else:
                    char = yield from self._named(char)
            except NotACall:
                text, char = self._given_up()
                self._text(text)
        self._end_of_text()

    def _list(self, char: str) -> Chars[str]:
        char = yield from self._next()
        while True:
            char = yield from self._space(char)
            char = yield from self._object(char)
            self._held = [char]
            char = yield from self._space(char)
            if char == "]":
                self._held = []
                char = yield
                return char
            char = yield from self._literal(",", char)

    def _named(self, char: str) -> Chars[str]:
        name = ""
        while char and char in _NAME:
            name += char
            char = yield from self._next()
        char = yield from self._space(char)
        if char == ID[0]:
            char = yield from self._tag(char)
        if not name or char != "{":
            raise NotACall
        self._begin(name)
        return (yield from self._arguments(char))

    def _tag(self, char: str) -> Chars[str]:
        """`[ARGS]`; before it perhaps `[CALL_ID]` and an id, for which the router has its own."""
        char = yield from self._next()
        wanted = ID if char == ID[1] else ARGS
        char = yield from self._literal(wanted[1:], char)
        if wanted == ID:
            while char and char in _NAME:
                char = yield from self._next()
            char = yield from self._literal(ARGS, char)
        return (yield from self._space(char))
