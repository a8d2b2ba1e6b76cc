"""Stop strings end a text at the same place however it is cut, and never leak in part."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.stop import StopStrings

TEXT = st.text("ab\n", max_size=30)
STOPS = st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=3).map(tuple)


def run(stops: tuple[str, ...], pieces: list[str]) -> tuple[str, bool]:
    watch = StopStrings(stops)
    text = ""
    for piece in pieces:
        text += watch.push(piece)
        if watch.is_hit:
            break
    return text + watch.flush(), watch.is_hit


def expected(stops: tuple[str, ...], text: str) -> tuple[str, bool]:
    """By looking at every beginning of the text in turn."""
    for end in range(len(text) + 1):
        hits = [stop for stop in stops if text[:end].endswith(stop)]
        if hits:
            return text[: end - max(map(len, hits))], True
    return text, False


@given(STOPS, TEXT, st.data())
def test_wherever_the_text_is_cut(stops: tuple[str, ...], text: str, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)))))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert run(stops, pieces) == expected(stops, text)


@given(STOPS, TEXT)
def test_nothing_is_given_that_must_be_taken_back(stops: tuple[str, ...], text: str) -> None:
    watch = StopStrings(stops)
    given_text = ""
    for character in text:
        given_text += watch.push(character)
        assert expected(stops, text)[0].startswith(given_text)
        if watch.is_hit:
            break


def test_text_is_not_held_longer_than_needed() -> None:
    watch = StopStrings(("\n\n",))
    assert watch.push("one") == "one"
    assert watch.push("\n") == ""
    assert watch.push("two") == "\ntwo"


def test_without_stop_strings_nothing_is_held() -> None:
    assert StopStrings(()).push("all of it") == "all of it"


def test_an_empty_stop_string_is_a_bug() -> None:
    with pytest.raises(AssertionError):
        StopStrings(("",))
