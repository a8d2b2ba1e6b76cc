"""Who computes what a broken transfer left out: another prefill worker, or decode itself. Pure.

Decode knows what a prefill leg takes from the handoffs it has seen, per token and with all its
waiting, and what its own steps take from the engine's cost model. It computes the tail itself when
that is quicker and the tail is short: a long one would be felt by the streams beside it.
"""

_WEIGHT = 0.2
"""Of the newest handoff."""

_MIN_TOKENS = 16
"""Shorter handoffs are mostly waiting, and say little about tokens."""


class TailPolicy:
    """See the module. `max_tokens` 0: decode never chooses to compute a tail."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._handoff_s: float | None = None  # per token, from ticket to COMMIT

    def learn(self, num_tokens: int, seconds: float) -> None:
        """A handoff of so many tokens took so long."""
        if num_tokens < _MIN_TOKENS:
            return
        each, known = seconds / num_tokens, self._handoff_s
        self._handoff_s = each if known is None else known + _WEIGHT * (each - known)

    def is_cheaper_here(self, num_missing: int, local_s: float | None) -> bool:
        """`local_s`: what the engine would take; None while it does not know."""
        if local_s is None or self._handoff_s is None or num_missing > self._max_tokens:
            return False
        return local_s < self._handoff_s * num_missing
