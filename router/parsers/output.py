"""One output of a model, taken apart: what it thinks, what it says, and what it calls."""

from router.parsers.chars import ToolParser
from router.parsers.events import Event, Reasoning, Text, merged
from router.parsers.reasoning import ReasoningParser


class OutputParser:
    """Reasoning comes first; in it nothing is a call."""

    def __init__(
        self,
        reasoning: ReasoningParser | None,
        tools: ToolParser | None,
        *,
        is_silent: bool = False,
    ) -> None:
        """`is_silent`: nobody wants to hear what it thinks."""
        self._is_silent = is_silent
        self._reasoning = reasoning
        self._tools = tools

    def push(self, text: str) -> list[Event]:
        if self._reasoning is None:
            return self._answer([Text(text)])
        return self._answer(self._reasoning.push(text))

    @property
    def is_cut(self) -> bool:
        """The text ended within a call, if it has ended."""
        return self._tools is not None and self._tools.is_cut

    def finish(self) -> list[Event]:
        """The text is over; nothing is pushed any more."""
        events = self._answer(self._reasoning.finish()) if self._reasoning is not None else []
        if self._tools is not None:
            events += self._tools.finish()
        return merged(events)

    def _answer(self, events: list[Event]) -> list[Event]:
        if self._is_silent:
            events = [event for event in events if not isinstance(event, Reasoning)]
        if self._tools is None:
            return events
        parsed: list[Event] = []
        for event in events:
            parsed += self._tools.push(event.text) if isinstance(event, Text) else [event]
        return parsed
