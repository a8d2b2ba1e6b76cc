"""What a parser makes of a text, in any pieces."""

from collections.abc import Callable, Sequence
from typing import Protocol

from hypothesis import strategies as st

from router.parsers.events import CallArguments, CallBegin, Event, Text, merged


class Parser(Protocol):
    def push(self, text: str) -> list[Event]: ...

    def finish(self) -> list[Event]: ...


def parsed(parser: Parser, pieces: Sequence[str]) -> list[Event]:
    events = [event for piece in pieces for event in parser.push(piece)]
    return merged([*events, *parser.finish()])


def check_pieces(new: Callable[[], Parser], text: str, cuts: Sequence[int]) -> list[Event]:
    """The same by characters, in the pieces between `cuts`, and at once."""
    whole = parsed(new(), [text])
    assert parsed(new(), list(text)) == whole
    ends = sorted(min(cut, len(text)) for cut in cuts)
    pieces = [text[a:b] for a, b in zip([0, *ends], [*ends, len(text)], strict=True)]
    assert parsed(new(), pieces) == whole
    return whole


def calls_of(events: Sequence[Event]) -> list[tuple[str, str]]:
    calls: list[tuple[str, str]] = []
    for event in events:
        if isinstance(event, CallBegin):
            calls.append((event.name, ""))
        elif isinstance(event, CallArguments):
            name, arguments = calls[-1]
            calls[-1] = name, arguments + event.text
    return calls


def text_of(events: Sequence[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, Text))


CUTS = st.lists(st.integers(0, 200), max_size=8)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=6,
)
ARGUMENTS = st.dictionaries(st.text(max_size=6), JSON, max_size=3)
