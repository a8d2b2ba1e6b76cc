"""What a model thinks, apart from what it says: `<think>…</think>` before the answer.

White space around the tags belongs to neither.
"""

import re

from router.parsers.chars import SPACE, CharParser, Chars, NotACall
from router.parsers.events import Reasoning, Text

OPEN = "<think>"
CLOSE = "</think>"
_SPACES = "".join(SPACE)
_PLAIN = re.compile("[^<]+")
_NONE = re.compile(r"(?!)")
_ALL = re.compile(".+", re.DOTALL)


class ReasoningParser(CharParser):
    def __init__(self, *, is_open: bool) -> None:
        """`is_open`: the model thinks from the first character on, as its prompt ends within the
        tags. It may say `<think>` once more."""
        self._is_open = is_open
        self._space_between: str | None = None
        """White space behind what was thought; None: nothing was yet."""
        super().__init__()

    def _run(self) -> Chars[None]:
        char = yield from self._next()
        try:
            char = yield from self._space(char)
            char = yield from self._literal(OPEN, char)
        except NotACall:
            text, char = self._given_up()
            if self._is_open:
                yield from self._think([*text, char])
            else:
                self._say(text)
                yield from self._rest(char)
        else:
            yield from self._think([char])

    def _think(self, pending: list[str]) -> Chars[None]:
        """`pending` goes before what comes."""
        held, coming = "", iter(pending)
        while held != CLOSE:
            char = next(coming, None)
            if char is None:
                plain = _NONE if held else _PLAIN  # what is held goes first
                char = yield from self._skim(plain, self._think_aloud)
            if not char:
                self._think_aloud(held)
                return
            if not CLOSE.startswith(held + char):  # its first character comes in it only once
                self._think_aloud(held)
                held = ""
            if CLOSE.startswith(held + char):
                held += char
            else:
                self._think_aloud(char)
        char = yield
        while char in SPACE:
            char = yield
        yield from self._rest(char)

    def _rest(self, char: str) -> Chars[None]:
        while char:
            self._say(char)
            char = yield from self._skim(_ALL, self._say)

    def _think_aloud(self, text: str) -> None:
        before = self._space_between
        if SPACE.issuperset(text):
            self._space_between = None if before is None else before + text
            return
        said = text.rstrip(_SPACES)
        self._events.append(Reasoning(said.lstrip(_SPACES) if before is None else before + said))
        self._space_between = text[len(said) :]

    def _say(self, text: str) -> None:
        if text:
            self._events.append(Text(text))
