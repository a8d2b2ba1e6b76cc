"""Calls as Hermes and Qwen models write them.

<tool_call>
{"name": "get_weather", "arguments": {"city": "Paris"}}
</tool_call>
"""

import re

from router.parsers.chars import Chars, NotACall, ToolParser

OPEN = "<tool_call>"
CLOSE = "</tool_call>"
_PLAIN = re.compile("[^<]+")


class HermesParser(ToolParser):
    def _run(self) -> Chars[None]:
        char = yield from self._skim(_PLAIN, self._text)
        while char:
            if char != OPEN[0]:
                self._text(char)
                char = yield from self._skim(_PLAIN, self._text)
                continue
            self._held = [char]
            try:
                char = yield from self._literal(OPEN, char)
                char = yield from self._call(char)
            except NotACall:
                text, char = self._given_up()
                self._text(text)
        self._end_of_text()

    def _call(self, char: str) -> Chars[str]:
        """Behind `<tool_call>`; some models leave the end tag out before another call."""
        tail = OPEN
        while tail != CLOSE and char:
            if tail.endswith(OPEN):
                char = yield from self._space(char)
                char = yield from self._object(char)
                tail = ""
                continue
            tail = (tail + char)[-len(CLOSE) :]
            char = yield
            if tail.endswith(OPEN):
                self._held = [*OPEN, char]
        if tail.endswith(OPEN):
            raise NotACall  # the text ends here
        return char
