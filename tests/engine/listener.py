"""An `on_events` that remembers and can be waited on."""

import threading
from collections.abc import Callable
from typing import TypeVar

from engine.request import (
    EngineEvent,
    FinishReason,
    RequestFailed,
    RequestId,
    TokensOut,
)

E = TypeVar("E", bound=EngineEvent)
DEADLINE_S = 20.0


class Listener:
    """Called on the engine thread, asked on the test's."""

    def __init__(self) -> None:
        self.batches: list[list[EngineEvent]] = []
        self.react: Callable[[EngineEvent], None] = lambda event: None
        self._changed = threading.Condition()

    def __call__(self, events: list[EngineEvent]) -> None:
        assert events
        for event in events:
            self.react(event)
        with self._changed:
            self.batches.append(events)
            self._changed.notify_all()

    def events(self, request_id: RequestId) -> list[EngineEvent]:
        with self._changed:
            return [e for events in self.batches for e in events if e.request_id == request_id]

    def of(self, kind: type[E], request_id: RequestId) -> list[E]:
        return [event for event in self.events(request_id) if isinstance(event, kind)]

    def wait_for(self, kind: type[E], request_id: RequestId, count: int = 1) -> E:
        """The count-th event of that kind."""
        with self._changed:
            came = self._changed.wait_for(
                lambda: len(self.of(kind, request_id)) >= count, DEADLINE_S
            )
        assert came, f"no {kind.__name__} for {request_id}: {self.events(request_id)}"
        return self.of(kind, request_id)[count - 1]

    def has_ended(self, request_id: RequestId) -> bool:
        return any(
            isinstance(event, RequestFailed)
            or (isinstance(event, TokensOut) and event.finish_reason is not None)
            for event in self.events(request_id)
        )

    def wait_ended(self, request_id: RequestId) -> FinishReason | None:
        """None: it failed."""
        with self._changed:
            came = self._changed.wait_for(lambda: self.has_ended(request_id), DEADLINE_S)
        assert came, f"{request_id} did not end: {self.events(request_id)}"
        last = self.events(request_id)[-1]
        return last.finish_reason if isinstance(last, TokensOut) else None

    def tokens(self, request_id: RequestId) -> tuple[int, ...]:
        """The output tokens told of, which are contiguous."""
        tokens: tuple[int, ...] = ()
        first = None
        for event in self.of(TokensOut, request_id):
            first = event.first_index if first is None else first
            assert event.first_index == first + len(tokens)
            tokens += event.token_ids
        return tokens
