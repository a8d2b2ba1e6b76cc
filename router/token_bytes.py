"""The bytes that a token stands for, whatever stands around it.

A character may need several tokens, so that a token alone need not be text: clients put the bytes
of tokens together instead. Joined, those of a byte-level tokenizer are the text itself.
"""

import re

from tokenizers import Tokenizer

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenBytes:
    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self._added = {token_id: token.content for token_id, token in added.items()}
        # The one description of a decoder that the library gives: its JSON.
        decoder = tokenizer.decoder
        is_byte_level = decoder is not None and b'"ByteLevel"' in decoder.__getstate__()
        self._byte_of = byte_alphabet() if is_byte_level else None

    def __call__(self, token_id: int) -> bytes:
        """Empty for an id without a token: models have more rows than tokenizers have tokens."""
        if (content := self._added.get(token_id)) is not None:
            return content.encode()
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if self._byte_of is not None and self._byte_of.keys() >= set(token):
            return bytes(self._byte_of[char] for char in token)
        if (byte := _BYTE_TOKEN.fullmatch(token)) is not None:
            return bytes.fromhex(byte[1])
        return token.replace("\N{LOWER ONE EIGHTH BLOCK}", " ").encode()  # SentencePiece's space


def token_text(token: bytes) -> str:
    """As text if it is some; else in OpenAI's words: `bytes:\\xf0\\x9f`."""
    try:
        return token.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)


def byte_alphabet() -> dict[str, int]:
    """GPT-2's: bytes that print stand for themselves in Latin-1, the others for what follows."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    alphabet = {chr(byte): byte for byte in visible}
    hidden = (byte for byte in range(256) if byte not in visible)
    return alphabet | {chr(256 + index): byte for index, byte in enumerate(hidden)}
