"""What is known of one sample of a prompt: the tokens delivered so far, and whether it has ended.

Tokens come from two streams, prefill's and decode's, and from later attempts; each index is
delivered once, from whoever says it first. Everyone later must say the same: an answer never
contradicts what the client has.
"""

import time
from collections.abc import Callable, Sequence

from router.errors import Reopen
from router.request import FinishReason, SamplingParams, TokenLogprobs

Deliver = Callable[[Sequence[int], FinishReason | None, Sequence[TokenLogprobs]], bool]
"""Takes the next tokens, why the answer ends if it does, and the tokens' logprobs if the prompt
asks for them; False: nothing more is wanted."""


class SampleProgress:
    """See the module."""

    def __init__(self, sampling: SamplingParams, deliver: Deliver) -> None:
        self.token_ids: list[int] = []
        """Delivered so far; index 0 is the first output token."""
        self.has_ended = False
        self.first_s = 0.0
        """When the first came, by time.monotonic; 0: it has not."""
        self._sampling = sampling
        self._deliver = deliver

    def accept(
        self,
        first_index: int,
        token_ids: Sequence[int],
        finish_reason: FinishReason | None = None,
        logprobs: Sequence[TokenLogprobs] = (),
    ) -> None:
        """Delivers what is new. Raises Reopen if a worker contradicts what was delivered, skips
        an index, or does not tell the logprobs that were asked for."""
        if self.has_ended:
            return
        if self._sampling.num_logprobs and len(logprobs) != len(token_ids):
            raise Reopen("logprobs_missing")
        known = self.token_ids[first_index : first_index + len(token_ids)]
        if first_index > len(self.token_ids) or (known and known != list(token_ids[: len(known)])):
            raise Reopen("contradiction")
        new = token_ids[len(known) :]
        self.token_ids += new
        if new and not self.first_s:
            self.first_s = time.monotonic()
        if new or finish_reason is not None:
            wants_more = self._deliver(new, finish_reason, logprobs[len(known) :])
            self.has_ended = finish_reason is not None or not wants_more

    def finish(self, reason: FinishReason) -> None:
        self.accept(len(self.token_ids), (), reason)

    def finish_if_full(self) -> None:
        """Only `Finished` was lost, if `max_tokens` are delivered."""
        if len(self.token_ids) >= self._sampling.max_tokens:
            self.finish(FinishReason.LENGTH)
