"""Pieces of a token stream, joined, are the whole decoding, and none has half a character."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from router.detokenizer import Detokenizer
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


def pieces_of(tokenizer: Tokenizer, token_ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer, special_ids(tokenizer))
    return [*(detokenizer.push(id) for id in token_ids), detokenizer.flush()]


def check_pieces(tokenizer: Tokenizer, token_ids: list[int]) -> None:
    pieces = pieces_of(tokenizer, token_ids)
    whole = tokenizer.decode(token_ids, skip_special_tokens=True)
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


def test_an_incomplete_end_is_told_only_at_the_end() -> None:
    tokenizer = TOKENIZERS["byte-level"]
    token_ids = tokenizer.encode("a🥐").ids[:-1]
    pieces = pieces_of(tokenizer, token_ids)
    assert "".join(pieces[:-1]) == "a"
    assert set(pieces[-1]) == {"\ufffd"}
