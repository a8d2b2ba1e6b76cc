"""Token ids to text while they come, never half a character.

The pieces of a stream, joined, are the decoding of all its tokens at once. Text is held back while
the next token may still change it: a character that is not complete, or a run of byte tokens,
which a byte-fallback decoder turns into text all together. What follows is decoded behind the
window of tokens that gave the last piece, because decoders treat the start of a text differently
(as vLLM and TGI do; the window is what keeps the cost constant per token).
"""

import re
from collections.abc import Collection, Sequence
from typing import Protocol

from tokenizers import Tokenizer

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class Detokenizer(Protocol):
    """One stream of tokens. Special tokens give no text, but for those that are shown."""

    def push(self, token_id: int) -> str:
        """The text that has become certain with this token; often none."""

    def flush(self) -> str:
        """What is left at the end of the stream, incomplete as it may be."""


class WindowDetokenizer:
    """Of any tokenizer. See the module."""

    def __init__(
        self, tokenizer: Tokenizer, special_ids: frozenset[int], shown: Collection[int] = ()
    ) -> None:
        self._tokenizer = tokenizer
        self._special_ids = special_ids
        self._shown = frozenset(shown) & special_ids
        # [ window: text given | held: no text given yet ]
        self._window: list[int] = []
        self._held: list[int] = []

    def push(self, token_id: int) -> str:
        """The text that has become certain with this token; often none."""
        if token_id in self._special_ids:
            return self._show(token_id) if token_id in self._shown else ""
        self._held.append(token_id)
        token = self._tokenizer.id_to_token(token_id)
        if token is None or _BYTE_TOKEN.fullmatch(token):
            return ""
        text = self._held_text()
        if not text or text.endswith(_REPLACEMENT):
            return ""
        self._window, self._held = self._held, []
        return text

    def flush(self) -> str:
        """What is left at the end of the stream, incomplete as it may be."""
        text = self._held_text() if self._held else ""
        self._window, self._held = [], []
        return text

    def _show(self, token_id: int) -> str:
        """What stands behind it begins like a text."""
        text = self.flush()
        return text + (self._tokenizer.id_to_token(token_id) or "")

    def _held_text(self) -> str:
        given = self._decode(self._window)
        return self._decode([*self._window, *self._held])[len(given) :]

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=True)
