"""Reasoning and answer, whatever pieces they come in."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from router.parsers.events import CallArguments, CallBegin, Event, Reasoning, Text
from router.parsers.hermes import HermesParser
from router.parsers.output import OutputParser
from router.parsers.reasoning import ReasoningParser
from tests.router.parsers.pieces import CUTS, check_pieces


def closed() -> ReasoningParser:
    return ReasoningParser(is_open=False)


def opened() -> ReasoningParser:
    return ReasoningParser(is_open=True)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<think>\nHm.\n</think>\n\nYes. ", [Reasoning("Hm."), Text("Yes. ")]),
        ("<think></think>Yes", [Text("Yes")]),
        ("<think>a < b </thin k", [Reasoning("a < b </thin k")]),
        (" Yes <think>no</think>", [Text(" Yes <think>no</think>")]),
        ("<thin", [Text("<thin")]),
        ("", []),
    ],
)
def test_a_model_that_opens_the_tag_itself(text: str, expected: list[Event]) -> None:
    assert check_pieces(closed, text, [3, 9]) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Hm.\n</think>\n\nYes.", [Reasoning("Hm."), Text("Yes.")]),
        ("<think>\nHm.</think>Yes.", [Reasoning("Hm."), Text("Yes.")]),
        ("</think>Yes.", [Text("Yes.")]),
        ("cut in the mid", [Reasoning("cut in the mid")]),
        ("<<think></th</think>", [Reasoning("<<think></th")]),
        ("<", [Reasoning("<")]),
        ("", []),
    ],
)
def test_a_prompt_that_opened_it(text: str, expected: list[Event]) -> None:
    assert check_pieces(opened, text, [1, 9]) == expected


FRAGMENTS = st.sampled_from(["<think>", "</think>", "<", "</", "think>", " ", "\n", "a", "é"])


@settings(deadline=None)
@example(["<think>", "<", "</think>", "think>"], False, [])
@given(st.lists(FRAGMENTS, max_size=12), st.booleans(), CUTS)
def test_anything_means_the_same_in_any_pieces(
    fragments: list[str], is_open: bool, cuts: list[int]
) -> None:
    text = "".join(fragments)
    events = check_pieces(lambda: ReasoningParser(is_open=is_open), text, cuts)
    kept = "".join(event.text for event in events if isinstance(event, Text | Reasoning))
    assert without_tags(kept) == without_tags(text)


def without_tags(text: str) -> str:
    """And without white space. What is left around a tag may be another one."""
    bare = "".join(text.split())
    while (less := bare.replace("<think>", "").replace("</think>", "")) != bare:
        bare = less
    return bare


def test_what_it_thinks_of_calling_is_no_call() -> None:
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    events = check_pieces(
        lambda: OutputParser(ReasoningParser(is_open=True), HermesParser()),
        f"{call}</think>\n{call}",
        [10, 60],
    )
    assert events == [Reasoning(call), CallBegin("f"), CallArguments("{}")]
