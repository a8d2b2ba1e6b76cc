"""What is known of one prompt while it is served: tokens delivered, workers that failed, time left.

Tokens come from two streams, prefill's and decode's, and from later attempts; each index is
delivered once, from whoever says it first. Everyone later must say the same: an answer never
contradicts what the client has.
"""

import asyncio
from collections.abc import Callable, Sequence

from router.errors import Reopen
from router.queue_line import FullQueues
from router.request import FinishReason, TokenLogprobs, ValidPrompt

Deliver = Callable[[Sequence[int], FinishReason | None, Sequence[TokenLogprobs]], bool]
"""Takes the next tokens, why the answer ends if it does, and the tokens' logprobs if the prompt
asks for them; False: nothing more is wanted."""


class Progress:
    def __init__(
        self,
        prompt: ValidPrompt,
        deliver: Deliver,
        deadline: float,
        note_cached: Callable[[int], None] = lambda num_tokens: None,
    ) -> None:
        self.prompt = prompt
        self.token_ids: list[int] = []
        """Delivered so far; index 0 is the first output token."""
        self.prompt_logprobs: list[TokenLogprobs] = []
        """Of the prompt's tokens but the first, as far as they have been told."""
        self._has_ended = False
        self.failed_prefills: set[str] = set()
        """Addresses: not asked again for this prompt."""
        self.failed_decodes: dict[str, int] = {}
        """Address → statuses it had given when it failed: asked again only if nobody else is
        left, and after it has told its status again."""
        self.full_queues = FullQueues()
        self.waited_for_queue_s = 0.0
        """In the router, because they were all full."""
        self._deliver = deliver
        self._deadline = deadline
        self._note_cached = note_cached
        self._num_cached_tokens = 0

    @property
    def remaining_s(self) -> float:
        """Until the deadline; at least a millisecond, because 0 is no limit on the wire."""
        return max(0.001, self._deadline - asyncio.get_running_loop().time())

    def note_cached(self, num_tokens: int) -> None:
        """So many prompt tokens were found in a worker's prefix cache; the largest number counts.
        To be told before the tokens that it came with."""
        if num_tokens > self._num_cached_tokens:
            self._num_cached_tokens = num_tokens
            self._note_cached(num_tokens)

    def accept(
        self,
        first_index: int,
        token_ids: Sequence[int],
        finish_reason: FinishReason | None = None,
        logprobs: Sequence[TokenLogprobs] = (),
    ) -> None:
        """Delivers what is new. Raises Reopen if a worker contradicts what was delivered, skips
        an index, or does not tell the logprobs that were asked for."""
        if self._has_ended:
            return
        if self.prompt.sampling.num_logprobs and len(logprobs) != len(token_ids):
            raise Reopen("logprobs_missing")
        known = self.token_ids[first_index : first_index + len(token_ids)]
        if first_index > len(self.token_ids) or known != list(token_ids[: len(known)]):
            raise Reopen("contradiction")
        new = token_ids[len(known) :]
        self.token_ids += new
        if new or finish_reason is not None:
            wants_more = self._deliver(new, finish_reason, logprobs[len(known) :])
            self._has_ended = finish_reason is not None or not wants_more

    def finish(self, reason: FinishReason) -> None:
        self.accept(len(self.token_ids), (), reason)

    def accept_prompt(self, first_index: int, logprobs: Sequence[TokenLogprobs]) -> None:
        """Keeps the first copy of each. Raises Reopen if a worker skips one."""
        num_known = len(self.prompt_logprobs) - (first_index - 1)
        if num_known < 0:
            raise Reopen("contradiction")
        self.prompt_logprobs += logprobs[num_known:]

    @property
    def lacks_prompt_logprobs(self) -> bool:
        num_wanted = len(self.prompt.token_ids) - 1
        wants = self.prompt.sampling.num_prompt_logprobs > 0
        return wants and len(self.prompt_logprobs) < num_wanted

    @property
    def is_finished(self) -> bool:
        """The answer has ended, and nothing about the prompt is still to come."""
        return self._has_ended and not self.lacks_prompt_logprobs

    @property
    def resume_token_ids(self) -> Sequence[int]:
        """What another attempt is told of the outputs. One token is left for it to say again, if
        only something about the prompt is missing."""
        return self.token_ids[:-1] if self._has_ended else self.token_ids

    @property
    def is_full(self) -> bool:
        """`max_tokens` are delivered."""
        return len(self.token_ids) >= self.prompt.sampling.max_tokens
