"""Pieces of a token stream, joined, are the whole decoding, and none has half a character."""

from collections.abc import Collection, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from router.byte_detokenizer import ByteDetokenizer, table_of
from router.detokenizer import Detokenizer, WindowDetokenizer
from tests.router.model_folder import byte_fallback_tokenizer, byte_level_tokenizer


def demo_tokenizer() -> dict[str, Tokenizer]:
    """The demo model's, if it has been prepared on this machine."""
    found = sorted((Path.home() / ".cache" / "baton").glob("**/tokenizer.json"))
    return {"demo-model": Tokenizer.from_file(str(found[0]))} if found else {}


TOKENIZERS = {
    "byte-level": byte_level_tokenizer(),
    "byte-fallback": byte_fallback_tokenizer(),
    **demo_tokenizer(),
}


def special_ids(tokenizer: Tokenizer) -> frozenset[int]:
    added = tokenizer.get_added_tokens_decoder()
    return frozenset(id for id, token in added.items() if token.special)


def detokenizers(tokenizer: Tokenizer, shown: Collection[int] = ()) -> Iterator[Detokenizer]:
    """All that read such tokens."""
    special = special_ids(tokenizer)
    yield WindowDetokenizer(tokenizer, special, shown)
    table = table_of(tokenizer, special)
    assert (table is None) == (tokenizer is TOKENIZERS["byte-fallback"])
    if table is not None:
        yield ByteDetokenizer(table, shown)


def run(detokenizer: Detokenizer, token_ids: list[int]) -> list[str]:
    return [*(detokenizer.push(id) for id in token_ids), detokenizer.flush()]


def pieces_of(tokenizer: Tokenizer, token_ids: list[int], shown: Collection[int] = ()) -> list[str]:
    window, *others = (run(each, token_ids) for each in detokenizers(tokenizer, shown))
    assert all("".join(other) == "".join(window) for other in others)
    return [window, *others][-1]


def check_pieces(tokenizer: Tokenizer, token_ids: list[int]) -> None:
    whole = tokenizer.decode(token_ids, skip_special_tokens=True)
    for detokenizer in detokenizers(tokenizer):
        pieces = run(detokenizer, token_ids)
        assert "".join(pieces) == whole
        assert sum(piece.count("\ufffd") for piece in pieces) == whole.count("\ufffd")


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(deadline=None)
@given(data=st.data())
def test_any_tokens(name: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[name]
    # One beyond the vocabulary: a model may have more rows than there are tokens.
    ids = st.integers(0, tokenizer.get_vocab_size())
    check_pieces(tokenizer, data.draw(st.lists(ids, max_size=40)))


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(deadline=None)
@given(data=st.data())
def test_eight_streams_at_once(name: str, data: st.DataObject) -> None:
    """Whose tokens come in whichever order."""
    tokenizer = TOKENIZERS[name]
    ids = st.integers(0, tokenizer.get_vocab_size())
    turns = data.draw(st.lists(st.tuples(st.integers(0, 7), ids), max_size=80))
    own = [[token_id for turn, token_id in turns if turn == index] for index in range(8)]
    for streams in zip(*(detokenizers(tokenizer) for _ in range(8)), strict=True):
        texts = [""] * 8
        for index, token_id in turns:
            texts[index] += streams[index].push(token_id)
        for text, stream, token_ids in zip(texts, streams, own, strict=True):
            assert text + stream.flush() == tokenizer.decode(token_ids, skip_special_tokens=True)


WRITTEN = (
    *("🏃‍♀️", "👩‍👩‍👧‍👦", "🇫🇷", "한국어", "\u1112\u1161\u11ab"),  # the last: Hangul in parts
    *("e\u0301\u0327", "เก้า", "नमस्ते", "a", " ", "é"),
)


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(deadline=None)
@given(parts=st.lists(st.sampled_from(WRITTEN), max_size=12))
def test_characters_of_many_tokens_are_never_broken(name: str, parts: list[str]) -> None:
    tokenizer = TOKENIZERS[name]
    token_ids = tokenizer.encode("".join(parts), add_special_tokens=False).ids
    check_pieces(tokenizer, token_ids)
    assert not any("\ufffd" in piece for piece in pieces_of(tokenizer, token_ids))


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(deadline=None)
@given(data=st.data())
def test_special_tokens_that_are_shown(name: str, data: st.DataObject) -> None:
    """Between texts that are each decoded as one."""
    tokenizer = TOKENIZERS[name]
    special = sorted(special_ids(tokenizer))
    ids = st.integers(0, tokenizer.get_vocab_size() - 1)
    token_ids = data.draw(st.lists(ids | st.sampled_from(special), max_size=40))
    shown = frozenset(special[1:])
    expected, others = "", list[int]()
    for token_id in token_ids:
        if token_id in shown:
            name_of = str(tokenizer.id_to_token(token_id))
            expected += tokenizer.decode(others, skip_special_tokens=True) + name_of
            others = []
        else:
            others.append(token_id)
    expected += tokenizer.decode(others, skip_special_tokens=True)
    assert "".join(pieces_of(tokenizer, token_ids, shown)) == expected


@given(st.text(max_size=40))
def test_any_text_comes_back(text: str) -> None:
    tokenizer = TOKENIZERS["byte-level"]
    assert "".join(pieces_of(tokenizer, tokenizer.encode(text).ids)) == text


def test_a_character_comes_with_its_last_token() -> None:
    tokenizer = TOKENIZERS["byte-level"]
    token_ids = tokenizer.encode("🥐!").ids
    pieces = pieces_of(tokenizer, token_ids)
    assert [piece for piece in pieces if piece] == ["🥐", "!"]


def test_special_tokens_give_no_text() -> None:
    tokenizer = TOKENIZERS["byte-level"]
    token_ids = tokenizer.encode("<|im_start|>Paris<|im_end|>").ids
    assert "".join(pieces_of(tokenizer, token_ids)) == "Paris"


def test_special_tokens_that_are_shown_stand_in_the_text() -> None:
    tokenizer = TOKENIZERS["byte-level"]
    text = "<|im_start|>Paris🥐<|im_end|>"
    token_ids = tokenizer.encode(text).ids
    assert "".join(pieces_of(tokenizer, token_ids, special_ids(tokenizer))) == text
    assert "".join(pieces_of(tokenizer, token_ids, token_ids[:1])) == text[: -len("<|im_end|>")]
    cut = [*tokenizer.encode("🥐").ids[:-1], token_ids[0]]
    assert "".join(pieces_of(tokenizer, cut, token_ids[:1])) == "\ufffd<|im_start|>"


def test_tokens_that_were_added_follow_the_decoder() -> None:
    """Letters of the alphabet of bytes are bytes there too, unless one of them is none."""
    tokenizer = byte_level_tokenizer()
    tokenizer.add_tokens(["é", "Ġĉ", "a b", "漢字", "<0x41>"])
    size = tokenizer.get_vocab_size()
    check_pieces(tokenizer, [*range(size - 5, size), 40, *range(size - 5, size)])


def test_an_incomplete_end_is_told_only_at_the_end() -> None:
    tokenizer = TOKENIZERS["byte-level"]
    token_ids = tokenizer.encode("a🥐").ids[:-1]
    pieces = pieces_of(tokenizer, token_ids)
    assert "".join(pieces[:-1]) == "a"
    assert set(pieces[-1]) == {"\ufffd"}
