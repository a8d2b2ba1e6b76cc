"""Token ids to text while they come, for tokenizers whose tokens stand for bytes (GPT-2's kind).

The text is the bytes of all tokens, one behind the other, read as UTF-8; what is none becomes
U+FFFD, as the tokenizer's own decoder does. So a token costs a look into a table, where others need
the decoder twice (router/detokenizer.py).
"""

import codecs
import json
from collections.abc import Collection

from tokenizers import Tokenizer

from router.token_bytes import byte_alphabet

_Utf8 = codecs.getincrementaldecoder("utf-8")


class TokenTable:
    """What each token adds to the text; filled as tokens come."""

    def __init__(self, tokenizer: Tokenizer, special_ids: frozenset[int]) -> None:
        self.special_ids = special_ids
        self._tokenizer = tokenizer
        self._byte_of = byte_alphabet()
        self._known: dict[int, bytes] = dict.fromkeys(special_ids, b"")

    def __getitem__(self, token_id: int) -> bytes:
        raw = self._known.get(token_id)
        if raw is None:
            raw = self._known[token_id] = self._look_up(token_id)
        return raw

    def written(self, token_id: int) -> str:
        """A special token as it is written."""
        return self._tokenizer.id_to_token(token_id) or ""

    def _look_up(self, token_id: int) -> bytes:
        """The decoder's rule, of added tokens too: letters are bytes if all are of the alphabet."""
        token = self._tokenizer.id_to_token(token_id) or ""
        raw = [self._byte_of.get(char, -1) for char in token]
        return token.encode() if -1 in raw else bytes(raw)


def table_of(tokenizer: Tokenizer, special_ids: frozenset[int]) -> TokenTable | None:
    """None: its tokens do not stand for bytes, or are more than that."""
    decoder = tokenizer.decoder
    # The one description of a decoder that the library gives: its JSON.
    kind = json.loads(decoder.__getstate__()).get("type") if decoder is not None else None
    return TokenTable(tokenizer, special_ids) if kind == "ByteLevel" else None


class ByteDetokenizer:
    """One stream of tokens. Special tokens give no text, but for those that are shown."""

    def __init__(self, table: TokenTable, shown: Collection[int] = ()) -> None:
        self._table = table
        self._shown = frozenset(shown) & table.special_ids
        self._utf8 = _Utf8(errors="replace")

    def push(self, token_id: int) -> str:
        """The text that has become certain with this token; often none."""
        if token_id in self._shown:
            return self.flush() + self._table.written(token_id)
        return self._utf8.decode(self._table[token_id])

    def flush(self) -> str:
        """What is left at the end of the stream, incomplete as it may be."""
        return self._utf8.decode(b"", final=True)
