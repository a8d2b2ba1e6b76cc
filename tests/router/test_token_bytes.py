"""Bytes of tokens: joined they are the text, also where a character needs several."""

from hypothesis import given, settings
from hypothesis import strategies as st

from router.token_bytes import TokenBytes, token_text
from router.tokenizer import TextTokenizer
from tests.router.model_folder import byte_fallback_tokenizer


@settings(deadline=None)
@given(st.text(max_size=40))
def test_those_of_a_byte_level_tokenizer_are_the_text(tokenizer: TextTokenizer, text: str) -> None:
    joined = b"".join(tokenizer.token_bytes(token_id) for token_id in tokenizer.encode(text))
    assert joined == text.encode()


def test_every_byte_has_a_token(tokenizer: TextTokenizer) -> None:
    alone = {tokenizer.token_bytes(token_id) for token_id in range(tokenizer.vocab_size)}
    assert {bytes([byte]) for byte in range(256)} <= alone


def test_special_tokens_and_rows_without_a_token(tokenizer: TextTokenizer) -> None:
    (end,) = tokenizer.encode_bare("<|im_end|>")
    assert tokenizer.token_bytes(end) == b"<|im_end|>"
    assert tokenizer.token_bytes(tokenizer.vocab_size + 5) == b""


def test_byte_fallback() -> None:
    tokenizer = byte_fallback_tokenizer()
    bytes_of = TokenBytes(tokenizer)
    expected = {"▁the": b" the", "<0xF0>": b"\xf0", "é": "é".encode(), "</s>": b"</s>"}
    for piece, raw in expected.items():
        token_id = tokenizer.token_to_id(piece)
        assert token_id is not None
        assert bytes_of(token_id) == raw


def test_text_of_what_is_no_text() -> None:
    assert token_text("é".encode()) == "é"
    assert token_text(b"\xf0\x9f") == "bytes:\\xf0\\x9f"
