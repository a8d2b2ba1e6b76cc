"""What a Chrome trace must be, so that Perfetto takes all of it: the Trace Event Format's rules."""

from collections import defaultdict
from typing import Any

Event = dict[str, Any]


def check_trace(document: dict[str, Any]) -> list[Event]:
    """Fails unless every event is well formed, placed and named; returns the complete ones."""
    events = document["traceEvents"]
    assert document["displayTimeUnit"] in ("ms", "ns")
    named = {(e["name"], e["pid"], e["tid"]) for e in events if e["ph"] == "M"}
    for event in events:
        assert isinstance(event["name"], str)
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert event["ph"] in ("M", "X", "s", "f")
        if event["ph"] == "M":
            assert event["args"]
            continue
        assert event["ts"] >= 0
        assert ("process_name", event["pid"], 0) in named
        assert ("thread_name", event["pid"], event["tid"]) in named
    slices = [event for event in events if event["ph"] == "X"]
    assert all(event["dur"] >= 0 for event in slices)
    _check_nesting(slices)
    _check_flows([event for event in events if event["ph"] in "sf"], slices)
    return slices


def _check_nesting(slices: list[Event]) -> None:
    """Slices of a thread lie beside each other or one in the other."""
    by_thread = defaultdict(list)
    for event in slices:
        by_thread[event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for spans in by_thread.values():
        spans.sort(key=lambda span: (span[0], -span[1]))
        open_ends: list[float] = []
        for begin, end in spans:
            while open_ends and open_ends[-1] <= begin:
                open_ends.pop()
            assert not open_ends or end <= open_ends[-1], spans
            open_ends.append(end)


def _check_flows(flows: list[Event], slices: list[Event]) -> None:
    """Each has one begin and one end, bound to slices."""
    ends = defaultdict(list)
    for flow in flows:
        ends[flow["id"]].append(flow["ph"])
        assert any(
            (s["pid"], s["tid"]) == (flow["pid"], flow["tid"])
            and s["ts"] <= flow["ts"] <= s["ts"] + s["dur"]
            for s in slices
        ), flow
        assert flow["ph"] == "s" or flow["bp"] == "e"
    assert all(sorted(phases) == ["f", "s"] for phases in ends.values())
