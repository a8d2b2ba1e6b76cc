"""The tokens of one sample as pieces of text, and their logprobs at the text's side.

Tokens become text token by token, so that an answer ends at the very token that completes a stop
string. Text is held back while it may change (router/detokenizer.py) or become a stop string
(router/stop.py); a token's logprobs go out with the first character of its text, so that a client
never learns by them what text it will not see: tokens that begin at or behind a stop string are
not told. What has no text (an end token) goes out with the text behind it, or at the end.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from router.detokenizer import Detokenizer
from router.metrics import TokenTimer
from router.request import FinishReason, TokenLogprobs
from router.stop import StopStrings


class PieceToken(NamedTuple):
    """A token, with logprobs if they were asked for."""

    token_id: int
    text_offset: int
    """Where its text begins in the choice's, in characters."""
    logprobs: TokenLogprobs | None
    """None of the first token of a prompt too: nothing is before it."""


@dataclass(frozen=True, slots=True)
class Piece:
    """More of one choice."""

    index: int
    """Of the sample: those of one prompt follow each other."""
    text: str
    """Empty only in a choice's last piece."""
    tokens: tuple[PieceToken, ...]
    """Those that go with it; none unless they, or logprobs, were asked for."""
    num_tokens: int
    """Output tokens of the choice so far."""
    num_cached_tokens: int
    """Prompt tokens that a worker had cached; told with the first sample of a prompt."""
    mean_logprob: float
    """Of those tokens; 0 unless logprobs were asked of the workers."""
    finish_reason: FinishReason | None
    """Set in the last piece of a choice, and only there."""


@dataclass(frozen=True, slots=True)
class PromptTold:
    """What was told of one prompt, when all of it is known."""

    index: int
    logprobs: tuple[TokenLogprobs, ...]
    """Of its tokens but the first; none unless they were asked for."""


class Choice:
    """See the module. Its `deliver` is a `sample.Deliver`."""

    def __init__(
        self,
        index: int,
        detokenizer: Detokenizer,
        stops: tuple[str, ...],
        min_tokens: int,
        timer: TokenTimer,
        emit: Callable[[Piece], None],
        *,
        keeps_stop: bool = False,
        keeps_tokens: bool = False,
    ) -> None:
        """`keeps_stop`: a stop string is part of the text that it ends. `keeps_tokens`: tokens go
        out without logprobs too."""
        self._index = index
        self._detokenizer = detokenizer
        self._stops = StopStrings(stops, are_kept=keeps_stop)
        self._keeps_tokens = keeps_tokens
        self._min_tokens = min_tokens
        self._timer = timer
        self._emit = emit
        self.finish_reason: FinishReason | None = None
        """Why it ended, if it has."""
        self._num_tokens = 0
        self._num_cached_tokens = 0
        self._sum_logprobs = 0.0
        self._num_certain = 0  # characters that came out of the detokenizer
        self._num_told = 0  # characters that went out
        self._held: deque[PieceToken] = deque()

    @property
    def num_tokens(self) -> int:
        """Output tokens so far."""
        return self._num_tokens

    def note_cached(self, num_tokens: int) -> None:
        self._num_cached_tokens = num_tokens

    def deliver(
        self,
        token_ids: Sequence[int],
        finish_reason: FinishReason | None,
        logprobs: Sequence[TokenLogprobs] = (),
    ) -> bool:
        before = self._num_tokens
        text = self._push_all(token_ids, logprobs)
        if self._num_tokens > before:
            self._timer.tokens(self._num_tokens - before)
        if finish_reason is not None and not self._stops.is_hit:
            text += self._stops.push(self._detokenizer.flush()) + self._stops.flush()
        if self._stops.is_hit:
            finish_reason = FinishReason.STOP
        if finish_reason is not None:
            self.finish_reason = finish_reason
            self._timer.finished()
        if text or finish_reason is not None:
            self._num_told += len(text)
            tokens = self._take_tokens(is_all=finish_reason is not None and not self._stops.is_hit)
            mean = self._sum_logprobs / max(1, self._num_tokens)
            counts = self._num_tokens, self._num_cached_tokens, mean
            self._emit(Piece(self._index, text, tokens, *counts, finish_reason))
        return finish_reason is None

    def _push_all(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> str:
        text = ""
        for index, token_id in enumerate(token_ids):
            self._num_tokens += 1
            if logprobs:
                self._sum_logprobs += logprobs[index].logprob
            if logprobs or self._keeps_tokens:
                told = logprobs[index] if logprobs else None
                self._held.append(PieceToken(token_id, self._num_certain, told))
            certain = self._detokenizer.push(token_id)
            self._num_certain += len(certain)
            if self._num_tokens <= self._min_tokens:  # stop strings are looked for behind them
                text += certain
                continue
            text += self._stops.push(certain)
            if self._stops.is_hit:
                break
        return text

    def _take_tokens(self, *, is_all: bool) -> tuple[PieceToken, ...]:
        """Those whose text has begun to go out."""
        taken = []
        while self._held and (is_all or self._held[0].text_offset < self._num_told):
            taken.append(self._held.popleft())
        return tuple(taken)
