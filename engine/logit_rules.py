"""What the choice of a sample's next token depends on beside its logits: its tokens so far.

One `LogitRules` for each sample that asks for anything of the kind (penalties, `logit_bias`,
`min_tokens`, `allowed_token_ids`, `bad_words`). It is built from token ids alone and catches up
with the outputs before each draw, so that it is the same wherever a sequence comes to life: on
another worker, behind a transfer, after a preemption. Numpy on the host; engine/logit_processors.py
applies it, many samples at a time.
"""

from collections.abc import Iterable, Sequence
from typing import Self

import numpy as np
import numpy.typing as npt

from engine.request import SamplingParams

Words = npt.NDArray[np.int32]
"""[ceil(vocab / 32)] a set of token ids: bit i % 32 of word i // 32 is token i."""


class LogitRules:
    """See the module. Belongs to one sample; engine thread only, once it is built."""

    def __init__(
        self, params: SamplingParams, prompt: Sequence[int], end_token_ids: Iterable[int]
    ) -> None:
        self.params = params
        self.has_penalties = _has_penalties(params)
        # Only repetition_penalty looks at the prompt.
        seen = prompt if params.repetition_penalty != 1.0 else ()
        self._counts = TokenCounts(seen)
        self._end_token_ids = sorted(end_token_ids)
        self._bad_words = BadWords(params.bad_words)
        self._outputs: npt.NDArray[np.int64] = np.empty(0, dtype=np.int64)
        self._allowed: Words | None = None

    @classmethod
    def of(
        cls, params: SamplingParams, prompt: Sequence[int], end_token_ids: Iterable[int]
    ) -> Self | None:
        """None if the sample asks for nothing: then its logits are taken as they are."""
        asks = (
            _has_penalties(params)
            or params.logit_bias
            or params.min_tokens
            or params.allowed_token_ids
            or params.bad_words
        )
        return cls(params, prompt, end_token_ids) if asks else None

    def catch_up(self, outputs: npt.NDArray[np.int64]) -> None:
        """`outputs` are all output tokens now: the ones known, perhaps more behind them."""
        if self.has_penalties:
            self._counts.add(outputs[len(self._outputs) :].tolist())  # host memory
        self._outputs = outputs

    @property
    def seen_token_ids(self) -> npt.NDArray[np.int64]:
        """[n] each token that a penalty may concern, once; a view."""
        return self._counts.token_ids

    @property
    def output_counts(self) -> npt.NDArray[np.float32]:
        """[n] how often each of `seen_token_ids` is among the outputs; a view."""
        return self._counts.counts

    def banned_token_ids(self) -> list[int]:
        """What must not come next, each once."""
        is_short = len(self._outputs) < self.params.min_tokens
        if not is_short and not self.params.bad_words:
            return []
        banned = self._bad_words.banned(self._outputs)
        if is_short:
            banned.update(self._end_token_ids)
        return sorted(banned)

    def allowed_words(self, vocab_size: int) -> Words | None:
        """`allowed_token_ids` as a set; None: anything."""
        if self.params.allowed_token_ids and self._allowed is None:
            self._allowed = pack_words(self.params.allowed_token_ids, vocab_size)
        return self._allowed


class TokenCounts:
    """Distinct token ids in the order they came, each with a count that may be 0."""

    def __init__(self, seen: Sequence[int]) -> None:
        """Ids `seen` count 0."""
        distinct = list(dict.fromkeys(seen))
        self._index = {token_id: index for index, token_id in enumerate(distinct)}
        self._token_ids = np.array(distinct, dtype=np.int64)
        self._counts = np.zeros(len(distinct), dtype=np.float32)

    @property
    def token_ids(self) -> npt.NDArray[np.int64]:
        return self._token_ids[: len(self._index)]

    @property
    def counts(self) -> npt.NDArray[np.float32]:
        return self._counts[: len(self._index)]

    def add(self, token_ids: Iterable[int]) -> None:
        for token_id in token_ids:
            index = self._index.setdefault(token_id, len(self._index))
            if index == len(self._token_ids):
                room = max(32, len(self._token_ids))
                self._token_ids = np.concatenate((self._token_ids, np.empty(room, np.int64)))
                self._counts = np.concatenate((self._counts, np.zeros(room, np.float32)))
            self._token_ids[index] = token_id
            self._counts[index] += 1


class BadWords:
    """Which tokens would complete a bad word, by the tokens that stand before it."""

    def __init__(self, words: Iterable[Sequence[int]]) -> None:
        self._last_by_prefix: dict[tuple[int, ...], set[int]] = {}
        for word in words:
            self._last_by_prefix.setdefault(tuple(word[:-1]), set()).add(word[-1])
        self._prefix_lengths = sorted({len(prefix) for prefix in self._last_by_prefix})

    def banned(self, outputs: npt.NDArray[np.int64]) -> set[int]:
        """Only outputs count: a word that the prompt begins is not known to be one."""
        banned: set[int] = set()
        for length in self._prefix_lengths:
            if length <= len(outputs):
                tail = outputs[len(outputs) - length :].tolist()  # host memory
                banned |= self._last_by_prefix.get(tuple(tail), set())
        return banned


def pack_words(token_ids: Iterable[int], vocab_size: int) -> Words:
    bits = np.zeros(-(-vocab_size // 32) * 32, dtype=np.bool_)
    bits[list(token_ids)] = True
    return np.packbits(bits, bitorder="little").view(np.int32)


def remove_ids(words: Words, token_ids: Sequence[int]) -> Words:
    """A copy of `words` without these ids; `words` itself where nothing else would be left."""
    if not token_ids:
        return words
    ids = np.array(token_ids)
    rest = words.copy()
    np.bitwise_and.at(rest, ids // 32, ~(np.int32(1) << (ids % 32).astype(np.int32)))
    return rest if rest.any() else words


def _has_penalties(params: SamplingParams) -> bool:
    return (
        params.presence_penalty != 0.0
        or params.frequency_penalty != 0.0
        or params.repetition_penalty != 1.0
    )
