"""What a model thinks, apart from what it says: `<think>…</think>` before the answer.

White space around the tags belongs to neither.
"""

from router.parsers.chars import SPACE, CharParser, Chars, NotACall
from router.parsers.events import Reasoning, Text

OPEN = "<think>"
CLOSE = "</think>"


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
                char = yield
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
            char = yield

    def _think_aloud(self, text: str) -> None:
        if SPACE.issuperset(text):
            if self._space_between is not None:
                self._space_between += text
            return
        self._events.append(Reasoning((self._space_between or "") + text))
        self._space_between = ""

    def _say(self, text: str) -> None:
        if text:
            self._events.append(Text(text))
