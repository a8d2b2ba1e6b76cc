"""What a model's text turns out to be, piece by piece: content, reasoning, calls of tools."""

import itertools
from collections.abc import Iterable
from typing import NamedTuple


class Text(NamedTuple):
    """For the user."""

    text: str


class Reasoning(NamedTuple):
    """What the model thinks before it answers."""

    text: str


class CallBegin(NamedTuple):
    """A call of this tool; its arguments follow."""

    name: str


class CallArguments(NamedTuple):
    """More of the arguments of the call that began last: JSON, as the model wrote it."""

    text: str


Event = Text | Reasoning | CallBegin | CallArguments


def merged(events: Iterable[Event]) -> list[Event]:
    """Neighbours of one kind as one."""
    result: list[Event] = []
    for kind, neighbours in itertools.groupby(events, type):
        if kind is CallBegin:
            result += neighbours
        else:
            text = "".join(event.text for event in neighbours if not isinstance(event, CallBegin))
            result.append(kind(text))
    return result
