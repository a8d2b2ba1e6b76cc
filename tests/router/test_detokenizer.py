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
