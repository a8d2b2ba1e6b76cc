"""Samples collected whole, and which of them are the answer.

The best is, as OpenAI says of `best_of`, the one with the highest log probability per token; all
tokens that were sampled count, an end token too. (vLLM, while it had `best_of`, took the sum over
the tokens, which favours short answers.)
"""

from collections.abc import Sequence

from router.choice import Piece, PieceToken
from router.request import FinishReason


class Sample:
    """The pieces of one sample, put together."""

    def __init__(self) -> None:
        self.text = ""
        self.tokens: tuple[PieceToken, ...] = ()
        self._last: Piece | None = None

    def add(self, piece: Piece) -> None:
        self.text += piece.text
        self.tokens += piece.tokens
        self._last = piece

    @property
    def last(self) -> Piece:
        assert self._last is not None
        return self._last

    @property
    def finish_reason(self) -> FinishReason:
        reason = self.last.finish_reason
        assert reason is not None, self.last
        return reason


def best_of(samples: Sequence[Sample], n: int) -> Sequence[Sample]:
    """The best `n`, the best first; all of them as they are, if so many are wanted."""
    if len(samples) == n:
        return samples
    return sorted(samples, key=lambda sample: -sample.last.mean_logprob)[:n]
