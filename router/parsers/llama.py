"""Calls as Llama 3 models write them: JSON without a mark around it.

    {"name": "get_weather", "parameters": {"city": "Paris"}}; {"name": …

`<|python_tag|>` may come before. As nothing but its look tells a call from other JSON, it must
begin with the name of a tool of the request.
"""

import re
from collections.abc import Collection

from router.parsers.chars import SPACE, Chars, NotACall, ToolParser

TAG = "<|python_tag|>"
_GAPS = SPACE | {";"}
_PLAIN = re.compile("[^<{]+")
_TYPE = "function"


class LlamaParser(ToolParser):
    def __init__(self, names: Collection[str]) -> None:
        self._names = frozenset(names)
        self._limit = 2 + 6 * max(map(len, names), default=0)  # quotes, and \u0041 for a letter
        super().__init__()

    def _run(self) -> Chars[None]:
        char = yield from self._skim(_PLAIN, self._said)
        while char:
            if char not in (TAG[0], "{"):
                self._said(char)
                char = yield from self._skim(_PLAIN, self._said)
                continue
            self._held = [char]
            try:
                if char == TAG[0]:
                    char = yield from self._literal(TAG, char)
                    self._held = []
                else:
                    char = yield from self._call(char)
            except NotACall:
                text, char = self._given_up()
                self._text(text)
        self._end_of_text()

    def _said(self, text: str) -> None:
        self._text(text, _GAPS if self._num_calls else SPACE)

    def _call(self, char: str) -> Chars[str]:
        char = yield from self._literal("{", char)
        char = yield from self._space(char)
        key, char = yield from self._key(char)
        if key == "type":
            kind, char = yield from self._string(char, self._limit + len(_TYPE))
            if kind != _TYPE:
                raise NotACall
            char = yield from self._comma(char)
            key, char = yield from self._key(char)
        if key != "name":
            raise NotACall
        name, char = yield from self._string(char, self._limit)
        if name not in self._names:
            raise NotACall
        char = yield from self._comma(char)
        key, char = yield from self._key(char)
        if key not in ("parameters", "arguments"):
            raise NotACall
        self._begin(name)
        char = yield from self._arguments(char)
        return (yield from self._rest_of_object(char))

    def _key(self, char: str) -> Chars[tuple[str, str]]:
        key, char = yield from self._string(char, len("parameters") + 2)
        char = yield from self._colon(char)
        return key, char

    def _comma(self, char: str) -> Chars[str]:
        char = yield from self._space(char)
        char = yield from self._literal(",", char)
        return (yield from self._space(char))
