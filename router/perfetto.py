"""A request as a Chrome trace, which Perfetto and chrome://tracing open: `?format=perfetto`.

A process for the router and for each worker, a thread for each stage and for each rank's part of
it, a complete event for each time a stage ran, and an arrow from shipping to installing. Times are
microseconds since the request arrived. Made from the explanation, so both say the same.
"""

from collections.abc import Iterator
from typing import Any

from router.explanation import Attempt, Explanation, Leg, Prompt, StageTimes

Event = dict[str, Any]
ROUTER = "router"


def trace(told: Explanation) -> dict[str, object]:
    """The document."""
    writer = _Writer()
    writer.request(told)
    for prompt in told.prompts:
        writer.prompt(prompt, told)
    return {
        "displayTimeUnit": "ms",
        "traceEvents": [*writer.metadata(), *writer.shifted()],
        "otherData": {"request_id": told.id, "clock_error_ms": told.clock_error_ms},
    }


class _Writer:
    """Numbers processes and threads as they come."""

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._pids: dict[str, int] = {}
        self._tids: dict[tuple[int, str], int] = {}
        self._num_flows = 0
        self._lane = ""

    def request(self, told: Explanation) -> None:
        end_ms = told.end_ms if told.end_ms is not None else _end_of(told)
        args = {"state": told.state, "parts_ms": told.parts_ms, "residual_ms": told.residual_ms}
        self._complete(ROUTER, "request", told.id, 0.0, end_ms, args)
        if told.read_ms is not None:
            self._complete(ROUTER, "body", "body", 0.0, told.read_ms, {})
            validate_ms = told.parts_ms.get("validate")
            if validate_ms is not None:
                self._complete(
                    ROUTER, "validate", "validate", told.read_ms, told.read_ms + validate_ms, {}
                )

    def prompt(self, prompt: Prompt, told: Explanation) -> None:
        """Prompts of one request overlap: then each has threads of its own."""
        self._lane = f" {prompt.id}" if len(told.prompts) > 1 else ""
        for wait in prompt.waits:
            self._complete(ROUTER, "line", prompt.id, wait.begin_ms, wait.end_ms, {})
        for attempt in prompt.attempts:
            end_ms = attempt.end_ms if attempt.end_ms is not None else _end_of(told)
            args = {
                "outcome": attempt.outcome,
                "candidates": [one.model_dump() for one in attempt.candidates],
            }
            name = f"{prompt.id} attempt {attempt.number}"
            self._complete(ROUTER, "attempts", name, attempt.begin_ms, end_ms, args)
            for leg in _legs(attempt):
                self._leg(prompt, leg, end_ms)
            self._handoff(attempt)

    def metadata(self) -> Iterator[Event]:
        for name, pid in self._pids.items():
            yield _named("process_name", pid, 0, {"name": name})
            yield _named("process_sort_index", pid, 0, {"sort_index": pid})
        for (pid, name), tid in self._tids.items():
            yield _named("thread_name", pid, tid, {"name": name})
            yield _named("thread_sort_index", pid, tid, {"sort_index": tid})

    def shifted(self) -> list[Event]:
        """Nothing begins before 0, as a worker's clock may have it."""
        earliest = min((event["ts"] for event in self._events), default=0.0)
        for event in self._events:
            event["ts"] -= min(earliest, 0.0)
        return self._events

    def _leg(self, prompt: Prompt, leg: Leg, end_ms: float) -> None:
        args = leg.model_dump(exclude={"stages", "ranks", "chunks", "candidates"})
        args["candidates"] = [one.model_dump() for one in leg.candidates]
        call_end_ms = leg.end_ms if leg.end_ms is not None else end_ms
        self._complete(leg.worker, f"{leg.kind} call", prompt.id, leg.begin_ms, call_end_ms, args)
        for stage in leg.stages:
            self._stage(leg.worker, stage.stage, stage, prompt)
        for rank in leg.ranks:
            for stage in rank.stages:
                self._stage(leg.worker, f"{stage.stage} rank {rank.rank}", stage, prompt)
        for chunk in leg.chunks:
            name = f"up to token {chunk.num_computed_tokens}"
            self._complete(leg.worker, "chunks", name, chunk.begin_ms, chunk.end_ms, {})

    def _stage(self, worker: str, thread: str, stage: StageTimes, prompt: Prompt) -> None:
        args = {"busy_ms": stage.busy_ms, "request": prompt.id}
        self._complete(worker, thread, stage.stage, stage.begin_ms, stage.end_ms, args)

    def _handoff(self, attempt: Attempt) -> None:
        """From the begin of the sender's ship to the middle of the receiver's install."""
        shipped = next(
            ((leg, stage) for leg in reversed(attempt.prefills) for stage in leg.stages
             if stage.stage == "ship"),
            None,
        )  # fmt: skip
        received = next(
            (stage for stage in (attempt.decode.stages if attempt.decode else ())
             if stage.stage == "install"),
            None,
        )  # fmt: skip
        if shipped is None or received is None or attempt.decode is None:
            return
        leg, ship = shipped
        self._num_flows += 1
        self._flow("s", leg.worker, "ship", ship.begin_ms)
        middle_ms = (received.begin_ms + received.end_ms) / 2
        self._flow("f", attempt.decode.worker, "install", middle_ms)

    def _flow(self, phase: str, process: str, thread: str, ms: float) -> None:
        pid, tid = self._place(process, thread)
        event: Event = {
            "ph": phase, "name": "handoff", "cat": "handoff", "id": self._num_flows,
            "pid": pid, "tid": tid, "ts": ms * 1000,
        }  # fmt: skip
        if phase == "f":
            event["bp"] = "e"  # it binds to the slice around it, not to the next one
        self._events.append(event)

    def _complete(
        self,
        process: str,
        thread: str,
        name: str,
        begin_ms: float,
        end_ms: float,
        args: dict[str, Any],
    ) -> None:
        pid, tid = self._place(process, thread)
        self._events.append(
            {
                "ph": "X", "name": name, "cat": thread, "pid": pid, "tid": tid,
                "ts": begin_ms * 1000, "dur": max(0.0, end_ms - begin_ms) * 1000, "args": args,
            }
        )  # fmt: skip

    def _place(self, process: str, thread: str) -> tuple[int, int]:
        pid = self._pids.setdefault(process, len(self._pids) + 1)
        lane = thread + self._lane
        return pid, self._tids.setdefault((pid, lane), len(self._tids) + 1)


def _legs(attempt: Attempt) -> Iterator[Leg]:
    yield from attempt.prefills
    if attempt.decode is not None:
        yield attempt.decode


def _end_of(told: Explanation) -> float:
    """Of what has not ended: as far as is known."""
    return (told.read_ms or 0.0) + (told.total_ms or 0.0)


def _named(kind: str, pid: int, tid: int, args: dict[str, Any]) -> Event:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "ts": 0, "args": args}
